"""The plain class attributes and globals that the code of a model reads: a graph has them baked in."""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

#: A namespace, and the names in it that hold plain values.
Place = tuple[Mapping[str, Any], tuple[str, ...]]


def constants_of(code: type | FunctionType) -> Hashable:
    """A key of the plain values that a class or a function reads now, without being given them."""
    return tuple((name, _key(names.get(name))) for names, held in _places(code) for name in held)


def _key(value: Any) -> tuple[type, Any]:
    return type(value), value if isinstance(value, PLAIN) else None


@functools.lru_cache(4096)
def _places(root: type | FunctionType) -> tuple[Place, ...]:
    """Where the code looks: its classes and their bases, and the globals that it and what it calls by name mention."""
    places: list[Place] = []
    seen: set[Any] = set()
    pending: list[Any] = [root]
    while pending:
        thing = pending.pop()
        if thing in seen or not _is_users(thing):
            continue
        seen.add(thing)
        if isinstance(thing, FunctionType):
            names, held = thing.__globals__, tuple(_mentioned(thing.__code__))
            pending += [names[name] for name in held if _is_users(names.get(name))]
        else:
            names, held = vars(thing), tuple(name for name in vars(thing) if not name.startswith("__"))
            pending += [one for one in map(_function, names.values()) if one is not None]
            pending += thing.__bases__
        places.append((names, tuple(name for name in held if name in names and isinstance(names[name], PLAIN))))
    return tuple(place for place in places if place[1])


def _is_users(thing: Any) -> bool:
    if not isinstance(thing, (type, FunctionType)):
        return False
    package = (getattr(thing, "__module__", None) or "").partition(".")[0]
    return package not in ("torch", "gramfx") and package not in sys.stdlib_module_names


def _function(held: Any) -> FunctionType | None:
    """The function that a class attribute is, or wraps as a method or property."""
    held = getattr(held, "fget", None) or getattr(held, "__func__", held)
    return held if isinstance(held, FunctionType) else None


def _mentioned(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _mentioned(inner)
