"""Tests run side by side, one thread each, and plan for one machine wherever they run."""

import os
from pathlib import Path

import torch

os.environ["GRAMFX_MACHINE"] = str(Path(__file__).with_name("machine.json"))
torch.set_num_threads(1)
