"""The plain class attributes and globals that the code of a model reads: a graph has them baked in."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

#: A namespace, and names in it that code mentions; None for all that it holds.
Place = tuple[Mapping[str, Any], tuple[str, ...] | None]

#: One with an order of its own comes before the dict that it is.
_CONTAINERS: tuple[type[Any], ...] = (list, tuple, set, frozenset, OrderedDict, dict, deque)


def constants_of(code: type | FunctionType) -> Hashable:
    """A key of the plain values, and containers of them, that a class or a function reads without being given them."""
    return tuple(
        (name, found)
        for names, mentioned in _places(code)
        for name in (mentioned or [name for name in names if not name.startswith("__")])
        if (found := frozen(names.get(name))) is not None
    )


#: Larger or deeper containers are told apart by identity and size.
MOST_ENTRIES, DEEPEST = 1024, 4


def frozen(value: Any, depth: int = 0) -> Hashable:
    """A key of a plain value or a container of such; None for anything else.

    Numbers go by how they are written: 0.0 is not -0.0, and nan is nan.
    """
    if isinstance(value, PLAIN):
        return type(value), repr(value) if isinstance(value, (float, complex)) else value
    base = base_of(value)
    if base is None:
        return None
    if depth == DEEPEST or base.__len__(value) > MOST_ENTRIES:
        return type(value), id(value), base.__len__(value)
    own = tuple((name, frozen(one, depth + 1)) for name, one in (fields(value) or {}).items())
    if issubclass(base, dict):
        pairs = ((name if isinstance(name, PLAIN) else id(name), one) for name, one in base.items(value))
        return type(value), own, tuple((name, frozen(one, depth + 1)) for name, one in pairs)
    each = (frozen(one, depth + 1) for one in base.__iter__(value))
    return type(value), own, frozenset(each) if base in (set, frozenset) else tuple(each)


def base_of(value: Any) -> Any:
    """The type of Python's own that a container is of; None for anything else.

    Containers are read as that has them: those of a user's class may load what they hold, or count, when asked. What
    they make that from is in their fields.
    """
    return next((one for one in _CONTAINERS if isinstance(value, one)), None)


def contents_of(container: Any) -> Any:
    """A copy of what a container holds, of the type of Python's own; None for anything else."""
    base = base_of(container)
    if base is None:
        return None
    return base(base.items(container) if issubclass(base, dict) else base.__iter__(container))


def fields(thing: Any) -> dict[str, Any] | None:
    """What an object of a user's class holds, by name; None for anything else."""
    if isinstance(thing, (type, FunctionType, torch.Tensor, torch.nn.Module)) or not _has_fields(type(thing)):  # type: ignore[arg-type]
        return None
    return inside(thing)


def is_array(thing: Any) -> bool:
    """Whether something is an array of numpy's, or a subclass of such."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(thing, numpy.ndarray)


def inside(thing: Any) -> dict[str, Any]:
    """The attributes that an object itself holds, in its ``__dict__`` and its slots."""
    slots = [name for one in type(thing).__mro__ for name in vars(one).get("__slots__", ()) if hasattr(thing, name)]
    return {**getattr(thing, "__dict__", {}), **{name: getattr(thing, name) for name in slots}}


@functools.lru_cache(4096)
def _has_fields(kind: type) -> bool:
    return kind is SimpleNamespace or _is_theirs(kind.__module__)


@functools.lru_cache(4096)
def _places(root: type | FunctionType) -> tuple[Place, ...]:
    """Where the code looks: its classes and their bases, the globals that it and what it calls by name mention, and the
    modules that these are."""
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
            values = [names[name] for name in held if name in names]
            pending += filter(_is_users, values)
            places += [(vars(one), held) for one in values if isinstance(one, ModuleType) and _is_theirs(one.__name__)]
            places.append((names, tuple(name for name in held if _may_vary(names.get(name)))))
        else:
            pending += [one for one in map(_function, vars(thing).values()) if one is not None]
            pending += thing.__bases__
            places.append((vars(thing), None))
    return tuple((names, held) for names, held in places if held is None or held)


def _may_vary(value: Any) -> bool:
    return isinstance(value, (*PLAIN, *_CONTAINERS))


def _is_users(thing: Any) -> bool:
    if not isinstance(thing, (type, FunctionType)):
        return False
    return _is_theirs(getattr(thing, "__module__", None) or "")


def _is_theirs(module: str) -> bool:
    package = module.partition(".")[0]
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
