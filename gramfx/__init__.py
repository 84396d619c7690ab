"""Gramians of Jacobians of any PyTorch model, by graph transformation."""

from gramfx import errors
from gramfx.api import Stage, Step, transform
from gramfx.pipeline import STAGES

__all__ = ["STAGES", "Stage", "Step", "errors", "transform"]
__version__ = "0.1.0"
