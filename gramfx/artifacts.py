"""What the compiler made, where torch's own tools look for it.

With ``TORCH_TRACE=folder`` every stage is an artifact of the structured trace, which tlparse turns into a report. With
``TORCH_LOGS="+gramfx"`` the stages are logged as they are made.
"""

from __future__ import annotations

import logging

from gramfx.fitting import Lowering
from gramfx.torch_compat import trace_artifact, tracing_artifacts
from gramfx.view.stages import views
from gramfx.view.text import text

log = logging.getLogger("gramfx")


def record(lowering: Lowering) -> None:
    """Hand the stages and the plan of a program to whoever listens."""
    if not (tracing_artifacts() or log.isEnabledFor(logging.DEBUG)):
        return
    shown = {name: text(stage) for name, stage in views(lowering).items()}
    if lowering.plan is not None:
        shown["plan"] = str(lowering.plan)
    for name, table in shown.items():
        log.debug("%s\n%s", name, table)
        if tracing_artifacts():
            trace_artifact(f"gramfx_{name}", table)
