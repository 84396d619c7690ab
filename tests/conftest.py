"""Tests run side by side, one thread each, and plan for one machine wherever they run."""

import os
from pathlib import Path

import pytest
import torch

os.environ["GRAMFX_MACHINE"] = str(Path(__file__).with_name("machine.json"))
torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much was compiled for a GPU that need not be there."""
    passed = terminalreporter.stats.get("passed", [])
    found = [held for report in passed for key, held in report.user_properties if key == "cross"]
    if found:
        programs, kernels, new, codes = (
            sum(one[key] for one in found) for key in ("programs", "kernels", "new", "codes")
        )
        terminalreporter.write_line(
            f"CUDA without a device: {programs} programs, {kernels} kernels, {new} of them new, {codes} machine codes"
        )
