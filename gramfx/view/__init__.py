"""Stages of the compiler as data, and the ways to show them."""

from gramfx.view.stages import NodeView, StageView, view, views

__all__ = ["NodeView", "StageView", "view", "views"]
