"""An op without a rule, taken apart at stand-in sizes, so that its parts' rules speak for it.

The parts are traced on a fake mode of their own: tracing on the graph's could fix its symbolic batch. Symbols become
distinct primes there, and digits found there are carried back only where no two original digits look alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from gramfx.axes import Loc, Size, Value, ragged
from gramfx.functions import PARTS
from gramfx.graph import value as fake_value
from gramfx.rules.table import Call, Operand

BATCH = 7
OTHERS = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157)


class StandIn:
    """The numbers that stand for a call's symbols."""

    def __init__(self, call: Call) -> None:
        sizes = [size for o in call.operands for size in (*o.shape, *([o.batch.inner] if o.batch else []))]
        sizes += [size for size in tree_flatten(list(call.args.values()))[0] if isinstance(size, sympy.Expr)]
        symbols = {symbol for size in sizes for symbol in sympy.sympify(size).free_symbols}
        batch = sympy.sympify(call.batch).free_symbols
        # What tells runs of rows apart stays a symbol.
        runs = {symbol for o in call.operands if (runs := ragged(o.batch)) for symbol in runs.unit.free_symbols}
        others = sorted(symbols - batch - runs, key=str)
        self.numbers = {**dict(zip(others, OTHERS, strict=False)), **dict.fromkeys(batch, BATCH)}
        self.inners = {o.batch.inner for o in call.operands if o.batch}

    def size(self, size: Size) -> int:
        """The number that stands in for a size."""
        return size if isinstance(size, int) else int(size.subs(self.numbers))

    def value(self, value: Value) -> Value:
        """The value with stand-in sizes."""
        batch = None if value.batch is None else Loc(value.batch.dim, self._inner(value.batch))
        return Value(tuple(self.size(size) for size in value.shape), value.differentiable, batch)

    def _inner(self, loc: Loc) -> Size:
        return self.size(loc.inner) if ragged(loc) is None else loc.inner

    def argument(self, argument: Any) -> Any:
        """The same argument at stand-in sizes, a tensor as ``(shape, dtype)`` in a ``Hole``."""
        if isinstance(argument, Operand):
            return Hole(tuple(self.size(size) for size in argument.shape), fake_value(argument.node).dtype)
        if isinstance(argument, (list, tuple)):
            return [self.argument(item) for item in argument]
        return self.size(argument) if isinstance(argument, sympy.Expr) else argument

    def original(self, loc: Loc) -> Loc | None:
        """A digit of the parts in the original sizes: its inner extent must be that of one operand's batch."""
        if not self.numbers:
            return loc
        alike = [inner for inner in self.inners if self._inner(Loc(loc.dim, inner)) == loc.inner]
        return Loc(loc.dim, alike[0]) if len(alike) == 1 else None


class Hole:
    """Where a tensor goes."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def __repr__(self) -> str:
        return f"{self.dtype}{self.shape}"


_graphs: dict[str, GraphModule | None] = {}
_MOST_GRAPHS = 4096


def decomposed(op: torch._ops.OpOverload, arguments: dict[str, Any]) -> GraphModule | None:
    """The functional ATen graph of one call with its tensors as placeholders, None if it cannot be traced."""
    key = f"{op} {arguments}"
    if key not in _graphs:
        if len(_graphs) == _MOST_GRAPHS:
            _graphs.clear()
        _graphs[key] = _trace(op, arguments)
    return _graphs[key]


def _trace(op: torch._ops.OpOverload, arguments: dict[str, Any]) -> GraphModule | None:
    names = [argument.name for argument in op._schema.arguments]
    positional = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    leaves, spec = tree_flatten([arguments[name] for name in names])

    def run(*tensors: torch.Tensor) -> Any:
        left = iter(tensors)
        filled = tree_unflatten([next(left) if isinstance(leaf, Hole) else leaf for leaf in leaves], spec)
        call = dict(zip(names, filled, strict=True))
        keyword = {name: value for name, value in call.items() if name not in positional}
        return op(*(call[name] for name in positional), **keyword)

    try:
        with unset_fake_temporarily(), FakeTensorMode(), torch.no_grad():
            tensors = [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in leaves if isinstance(leaf, Hole)]
            table = dict(core_aten_decompositions())
            if op in PARTS:
                graph_module = make_fx(PARTS[op], decomposition_table=table)(*tensors)
            else:
                graph_module = make_fx(_functional(run), decomposition_table=table)(*tensors)
    except Exception:  # whatever an op's own decomposition raises: without parts it has no rule
        return None
    calls = [n.target for n in graph_module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return None if any(target is op or target._schema.is_mutable for target in calls) else graph_module


def _functional(run: Callable[..., Any]) -> Callable[..., Any]:
    return torch.func.functionalize(run, remove="mutations_and_views")
