"""Gramians of Jacobians of any PyTorch model, by graph transformation."""

from gramfx import errors
from gramfx.api import Stage, Step, transform
from gramfx.engine import Engine
from gramfx.jacobian import gramian
from gramfx.pipeline import STAGES
from gramfx.plan import Plan

__all__ = ["STAGES", "Engine", "Plan", "Stage", "Step", "errors", "gramian", "transform"]
__version__ = "0.1.0"
