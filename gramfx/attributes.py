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

from gramfx.constants import PLAIN, base_of, contents_of, fields, frozen, is_array
from gramfx.readings import Number
from gramfx.torch_compat import read_from_values

_OF_EVERY_MODULE = vars(nn.Module()).keys()


@dataclass(frozen=True)
class State:
    """What modules hold, and the containers, arrays and objects that they reach.

    held: each of them all by id, with a copy of what it holds; values: what is plain among that, in the same order.
    """

    held: dict[int, tuple[Any, Any]]
    values: tuple[Hashable, ...]


def plain_state(program: nn.Module) -> State:
    """As things are now, in all modules that a program runs."""
    held = _held(program)
    return State(held, tuple(_plain(holder, contents) for holder, contents in held.values()))


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
    """A copy of what a module, a container, an array or an object holds; None for anything else.

    Arrays that cannot be written are left out: they may be files of any size.
    """
    if isinstance(holder, nn.Module):
        return _own(holder)
    if is_array(holder):
        return holder.copy() if holder.flags.writeable else None
    held = contents_of(holder)
    return fields(holder) if held is None else held


def _values(contents: Any) -> Iterator[Any]:
    if not is_array(contents):
        yield from contents.values() if isinstance(contents, dict) else contents


def _plain(holder: Any, contents: Any) -> Hashable:
    """A key of the plain values in a holder; of the rest it says the types."""
    if is_array(contents):
        return contents.dtype, contents.shape, contents.tobytes()
    names = tuple(map(frozen, contents)) if isinstance(contents, dict) else ()
    return type(holder), names, tuple(frozen(one) if isinstance(one, PLAIN) else type(one) for one in _values(contents))


def _held(program: nn.Module) -> dict[int, tuple[Any, Any]]:
    """All modules of a program, and the containers, arrays and objects they reach, each with its contents, by id."""
    found: dict[int, tuple[Any, Any]] = {}
    pending: list[Any] = list(program.children())
    while pending:
        thing = pending.pop()
        if isinstance(thing, PLAIN) or id(thing) in found:
            continue
        contents = _contents(thing)
        if contents is not None:
            found[id(thing)] = thing, contents
            pending += _values(contents)
        if isinstance(thing, nn.Module):
            pending += thing.children()
        elif base_of(thing) is not None and fields(thing) is not None:
            # Containers of users' classes hold fields as well.
            pending.append(vars(thing))
    return found


def put_back(state: State) -> None:
    """Let everything hold what it did."""
    for holder, held in state.held.values():
        now = _contents(holder)
        if _alike(now, held):
            continue
        if is_array(holder):
            holder[...] = held
        elif isinstance(holder, (dict, set)):
            holder.clear()
            holder.update(held)
        elif isinstance(holder, (list, deque)):
            holder.clear()
            holder.extend(held)
        elif not isinstance(holder, (tuple, frozenset)):
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
        held = (value for _, contents in _held(program).values() for value in _values(contents))
        left.append(any(isinstance(value, Number) or read_from_values(value) for value in held))

    hook = program.register_forward_hook(look)
    try:
        yield left
    finally:
        hook.remove()


def changed(before: State, after: State) -> bool:
    """Whether the forward leaves other plain values than it found."""
    return before.values != after.values


def _alike(a: Any, b: Any) -> bool:
    """Whether holders held the same things, compared by identity: equality of tensors is no answer."""
    if is_array(a):
        return bool(a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return list(map(id, a)) == list(map(id, b)) and list(map(id, a.values())) == list(map(id, b.values()))
    return [id(one) for one in a] == [id(one) for one in b]


@contextlib.contextmanager
def run_anew(before: State, program: nn.Module) -> Iterator[None]:
    """Run the forward once more from what it found, and leave what it left the first time."""
    after = plain_state(program)
    put_back(before)
    try:
        yield
    finally:
        put_back(after)
