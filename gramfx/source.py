"""The user's own source lines, among the frames of torch and of gramfx."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence

import torch

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
#: Folders whose frames are not the user's. ``passes`` is a link, and may be seen by either name.
_NOT_USERS = tuple(
    os.path.join(folder, "")
    for folder in (os.path.dirname(torch.__file__), _PACKAGE, os.path.realpath(os.path.join(_PACKAGE, "passes")))
)


def is_users(file: str) -> bool:
    """Whether a source file is neither torch's nor gramfx's."""
    return not file.startswith(("<", *_NOT_USERS)) and os.path.basename(file) not in ("contextlib.py", "functools.py")


def user_frame(frames: Sequence[traceback.FrameSummary]) -> str | None:
    """The innermost frame of the user's, as ``file.py:12 in forward: code``."""
    for frame in reversed(frames):
        if is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return None


def warn_user(warning: Warning) -> None:
    """Warn at the user's line that called into gramfx."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(warning, stacklevel=level)
