"""What a forward leaves in its modules: numbers, lists, objects and the like, not parameters and buffers.

A model that counts its calls, say, is run several times at a capture; afterwards it must have counted one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gramfx.constants import DEEPEST, MOST_ENTRIES, fields, frozen
from gramfx.readings import Number
from gramfx.torch_compat import read_from_values

_MUTABLE = (list, dict, set, deque)
_OF_EVERY_MODULE = vars(nn.Module()).keys()


@dataclass(frozen=True)
class State:
    """What modules hold, and the containers and objects that they reach.

    values: a key of each attribute, by id of its module and name; held: each of them all with a copy of what it holds.
    """

    values: dict[tuple[int, str], Hashable]
    held: dict[int, tuple[Any, Any]]


def plain_state(program: nn.Module) -> State:
    """As things are now, in all modules that a program runs."""
    modules = [module for child in program.children() for module in child.modules()]
    values = {(id(module), name): _known(value) for module in modules for name, value in _own(module).items()}
    return State(values, {id(holder): (holder, _contents(holder)) for holder in _holders(modules)})


def _own(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are neither torch's bookkeeping nor tensors.

    Tensors are another matter: what is carried over in them shows in the graph.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return {}
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE
        and not isinstance(value, (Tensor, nn.Module))
        and not (isinstance(module, nn.RNNBase) and name.startswith("_flat_weight"))
    }


def _contents(holder: Any) -> Any:
    """A copy of what a module, a container or an object holds."""
    if isinstance(holder, nn.Module):
        return _own(holder)
    return holder.copy() if isinstance(holder, _MUTABLE) else fields(holder)


def _values(held: Any) -> Iterator[Any]:
    yield from held.values() if isinstance(held, dict) else held


def _holders(modules: list[nn.Module]) -> list[Any]:
    """The modules, and the containers and objects that they reach. Into large containers it does not look."""
    found: dict[int, Any] = {}
    pending: list[Any] = list(modules)
    while pending:
        thing = pending.pop()
        if isinstance(thing, tuple):
            pending += thing
        elif id(thing) not in found and (isinstance(thing, (nn.Module, *_MUTABLE)) or fields(thing) is not None):
            found[id(thing)] = thing
            held = _contents(thing)
            pending += _values(held) if len(held) <= MOST_ENTRIES or isinstance(thing, nn.Module) else ()
    return list(found.values())


def put_back(state: State, program: nn.Module) -> None:
    """Let attributes be and hold what they did; remove those that were not there."""
    for holder, held in state.held.values():
        now = _contents(holder)
        if _alike(now, held):
            continue
        if isinstance(holder, _MUTABLE):
            holder.clear()
            (holder.update if isinstance(holder, (dict, set)) else holder.extend)(held)
        else:
            _put_fields_back(holder, now, held)


def _put_fields_back(holder: Any, now: dict[str, Any], held: dict[str, Any]) -> None:
    # Frozen objects have no other way.
    put, remove = (setattr, delattr) if isinstance(holder, nn.Module) else (object.__setattr__, object.__delattr__)
    for name in now.keys() - held.keys():
        remove(holder, name)
    for name, value in held.items():
        became_tensor = isinstance(holder, nn.Module) and isinstance(vars(holder).get(name), Tensor)
        if not became_tensor and (name not in now or now[name] is not value):
            put(holder, name, value)


@contextlib.contextmanager
def readings_left(program: nn.Module) -> Iterator[list[bool]]:
    """Note for each run of the forward whether it left anywhere what stands for a number read from a tensor.

    While a trace goes on: export puts attributes back when it ends.
    """
    left: list[bool] = []

    def look(*_: Any) -> None:
        modules = [module for child in program.children() for module in child.modules()]
        held = (value for holder in _holders(modules) for value in _values(_contents(holder)))
        left.append(any(isinstance(value, Number) or read_from_values(value) for value in held))

    hook = program.register_forward_hook(look)
    try:
        yield left
    finally:
        hook.remove()


def changed(before: State, after: State) -> bool:
    """Whether the forward leaves other plain values than it found, in attributes or in what these hold."""
    return any(before.values.get(key) != value for key, value in after.values.items())


def _known(value: Any, depth: int = 0) -> Hashable:
    """A key of the plain values in an attribute, in containers there, and in the fields of objects."""
    if isinstance(value, (tuple, list, deque, dict)) and depth < DEEPEST and len(value) <= MOST_ENTRIES:
        names = tuple(map(frozen, value)) if isinstance(value, dict) else ()
        return type(value), names, tuple(_known(one, depth + 1) for one in _values(value))
    own = fields(value)
    return frozen(value) if own is None else (type(value), tuple((name, frozen(one)) for name, one in own.items()))


def _alike(a: Any, b: Any) -> bool:
    """Whether containers hold the same things, compared by identity: equality of tensors is no answer."""
    if a is None or b is None:
        return a is b
    if isinstance(a, dict):
        return list(map(id, a)) == list(map(id, b)) and list(map(id, a.values())) == list(map(id, b.values()))
    return [id(one) for one in a] == [id(one) for one in b]


@contextlib.contextmanager
def run_anew(before: State, program: nn.Module) -> Iterator[None]:
    """Run the forward once more from what it found, and leave what it left the first time."""
    after = plain_state(program)
    put_back(before, program)
    try:
        yield
    finally:
        put_back(after, program)
