"""Stages as one page for a browser, with everything that it needs inside."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from string import Template

from gramfx.view.dot import COLOURS
from gramfx.view.stages import BACKWARD, StageView

#: Cytoscape.js draws, dagre lays out; their licences lie beside them.
_LIBRARIES = ("cytoscape.min.js", "cytoscape-dagre.min.js")


def page(title: str, stages: Mapping[str, StageView], shown: str, plan: Sequence[str] = ()) -> str:
    """A self-contained HTML page of all stages that shows ``shown`` first. plan: the lines of the printed plan."""
    data = {
        **{"title": title, "shown": shown, "plan": list(plan), "colours": COLOURS, "backward": BACKWARD},
        "stages": {name: _nodes(stage) for name, stage in stages.items()},
    }
    scripts = "\n".join(f"<script>{_safe(_read(name))}</script>" for name in _LIBRARIES)
    return Template(_read("page.html")).substitute(
        title=title.replace("&", "&amp;").replace("<", "&lt;"),
        style=_read("page.css"),
        libraries=scripts,
        data=_safe(json.dumps(data, separators=(",", ":"))),
        program=_read("page.js"),
    )


def _nodes(stage: StageView) -> list[dict[str, object]]:
    return [{**{key: held for key, held in asdict(one).items() if held}, "mark": one.mark} for one in stage.nodes]


def _read(name: str) -> str:
    text = resources.files("gramfx.view").joinpath("assets", name).read_text(encoding="utf-8")
    return re.sub(r"//# sourceMappingURL=\S+", "", text)


def _safe(script: str) -> str:
    """Nothing inside ends the script element."""
    return script.replace("</", "<\\/")
