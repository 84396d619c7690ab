"""Stages of the compiler as data, and the ways to show them."""

from gramfx.view.stages import NodeView, StageView, views

__all__ = ["NodeView", "StageView", "views"]
