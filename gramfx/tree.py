"""Arguments as a flat list of leaves, and back: torch's pytrees, plus dataclasses and any mapping."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

from gramfx.torch_compat import pytree


@dataclasses.dataclass(frozen=True)
class Tree:
    """The structure of a nest of containers: ``unflatten`` inverts ``flatten``.

    ``spec`` is torch's pytree; ``opaque`` holds, for each leaf of it, ``None`` or the container that torch does
    not know (a dataclass or a mapping) with the tree of its contents.
    """

    spec: Any
    opaque: tuple[tuple[Any, Tree] | None, ...]

    def unflatten(self, leaves: list[Any]) -> Any:
        """The nest with ``leaves`` in place of its own."""
        return self._take(iter(leaves))

    def _take(self, leaves: Any) -> Any:
        values = [next(leaves) if held is None else _refill(held[0], held[1]._take(leaves)) for held in self.opaque]
        return pytree.tree_unflatten(values, self.spec)

    def key(self) -> Hashable:
        """Equal for nests of the same structure."""
        held = tuple(None if one is None else (type(one[0]), one[1].key()) for one in self.opaque)
        return str(self.spec), held


def flatten(nest: Any) -> tuple[list[Any], Tree]:
    """The leaves of ``nest`` in order, and its structure."""
    values, spec = pytree.tree_flatten(nest)
    leaves: list[Any] = []
    opaque: list[tuple[Any, Tree] | None] = []
    for value in values:
        contents = _contents(value)
        if contents is None:
            leaves.append(value)
            opaque.append(None)
        else:
            inner, tree = flatten(contents)
            leaves.extend(inner)
            opaque.append((value, tree))
    return leaves, Tree(spec, tuple(opaque))


def _contents(value: Any) -> dict[Any, Any] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(value) if isinstance(value, Mapping) else None


def _refill(container: Any, contents: dict[Any, Any]) -> Any:
    made = copy.copy(container)
    for name, value in contents.items():
        if isinstance(container, Mapping):
            made[name] = value
        else:
            object.__setattr__(made, name, value)
    return made
