"""The attributes that a forward sets on its modules: numbers, lists and the like, not parameters and buffers.

A model that counts its calls, say, is run several times at a capture; afterwards it must have counted one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from gramfx.constants import PLAIN, frozen
from gramfx.readings import Number
from gramfx.torch_compat import read_from_values

_CONTAINERS = (list, dict, set, deque)
_OF_EVERY_MODULE = vars(nn.Module()).keys()

#: By module and name: the module, what the attribute is, and a copy of it where it can be changed in place.
State = dict[tuple[int, str], tuple[nn.Module, Any, Any]]


def plain_state(program: nn.Module) -> State:
    """Plain values, and containers with what they hold now, of all modules that a program runs."""
    return {
        (id(module), name): (module, value, value.copy() if isinstance(value, _CONTAINERS) else None)
        for child in program.children()
        for module in child.modules()
        for name, value in _own(module).items()
        if name not in _OF_EVERY_MODULE and isinstance(value, (*PLAIN, tuple, *_CONTAINERS))
    }


def _own(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are not torch's bookkeeping."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return {}
    if isinstance(module, nn.RNNBase):
        return {name: value for name, value in vars(module).items() if not name.startswith("_flat_weight")}
    return vars(module)


def put_back(state: State, program: nn.Module) -> None:
    """Let attributes be and hold what they did; remove those that were not there."""
    for key, (module, _, _) in plain_state(program).items():
        if key not in state:
            delattr(module, key[1])
    for (_, name), (module, value, held) in state.items():
        # Tensors are another matter: what is carried over in them shows in the graph.
        if vars(module).get(name) is not value and not isinstance(vars(module).get(name), Tensor):
            setattr(module, name, value)
        if held is not None and not _alike(value, held):
            value.clear()
            (value.update if isinstance(value, (dict, set)) else value.extend)(held)


def read_values(program: nn.Module) -> bool:
    """Whether a trace left in an attribute what stands for a number that was read from a tensor."""
    held = (value for child in program.children() for module in child.modules() for value in vars(module).values())
    return any(isinstance(value, Number) or read_from_values(value) for value in held)


def changed(before: State, after: State) -> bool:
    """Whether the forward leaves other plain values than it found, in attributes or in containers there."""
    return any(key not in before or _known(before[key]) != _known(after[key]) for key in after)


def _known(entry: tuple[nn.Module, Any, Any]) -> Any:
    _, value, held = entry
    return frozen(value if held is None else held)


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
