"""From a view of a parameter, or rows of it chosen by constant ids, back to the parameter: no tensor is touched.

Each rule inverts one view op on a :class:`Spelling`, the axes of each dim of the op's output, and leaves the axes of
each dim of its input. A rule returns ``False`` where names alone cannot say it; then the rows are made and pulled
back by the op's VJP.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from gramfx.forms import OneHot
from gramfx.graph import ancestors, argument, arguments, value
from gramfx.terms import SAMPLE
from gramfx.torch_compat import same_shape

aten = torch.ops.aten


class Spelling:
    """The axes of each dim of a value, with extents.

    ``splits`` records axes that had to be taken apart, ``choices`` the one-hot factors of rows chosen by ids.
    """

    def __init__(self, dims: list[list[str]], sizes: dict[str, int]) -> None:
        self.dims, self.sizes = dims, sizes
        self.slices: dict[str, tuple[int, int]] = {}
        self.splits: dict[str, list[str]] = {}
        self.choices: list[tuple[Node, tuple[str, ...], OneHot]] = []

    def fresh(self, size: int) -> str:
        """A new axis of the parameter."""
        name = f"p{len(self.sizes)}"
        self.sizes[name] = size
        return name

    def split(self, axis: str, outer: int) -> list[str]:
        """Take ``axis`` apart into ``outer`` times the rest."""
        parts = [self.fresh(outer), self.fresh(self.sizes[axis] // outer)]
        self.splits[axis] = parts
        self.dims = [[new for old in dim for new in (parts if old == axis else [old])] for dim in self.dims]
        return parts


def _same(node: Node, spelling: Spelling) -> bool:
    return True


def _permute(node: Node, spelling: Spelling) -> bool:
    rank = value(node).dim()
    order = [d % rank for d in _dims(node)]
    dims = dict(zip(order, spelling.dims, strict=True))
    spelling.dims = [dims[d] for d in range(rank)]
    return True


def _dims(node: Node) -> list[int]:
    """The permutation of a ``t``, ``transpose`` or ``permute``."""
    rank = value(node).dim()
    if node.target is aten.permute.default:
        return list(arguments(node)[1])
    a, b = (0, min(1, rank - 1)) if node.target in (aten.t.default, aten.numpy_T.default) else arguments(node)[1:3]
    order = list(range(rank))
    order[int(a)], order[int(b)] = order[int(b)], order[int(a)]
    return order


def _reshape(node: Node, spelling: Spelling) -> bool:
    """Any change of shape that keeps the row-major order: view, squeeze, unsqueeze, flatten."""
    if _reads_parameter(node):
        # Entries are in row-major order, and that is all a term says of its parameter.
        spelling.dims = [[axis for dim in spelling.dims for axis in dim]]
        return True
    if any(axis in spelling.slices for dim in spelling.dims for axis in dim):
        return _reshape_sliced(node, spelling)
    flat = [axis for dim in spelling.dims for axis in dim if spelling.sizes[axis] != 1]
    dims: list[list[str]] = []
    for size in value(arguments(node)[0]).shape:
        dim = _take(flat, int(size), spelling)
        if dim is None:
            return False
        dims.append(dim)
    spelling.dims = dims
    return True


def _reads_parameter(node: Node) -> bool:
    source = arguments(node)[0]
    return isinstance(source, Node) and source.op == "placeholder"


def _take(flat: list[str], size: int, spelling: Spelling) -> list[str] | None:
    """Axes from the front of ``flat`` that make up a dim of ``size``, splitting the last where need be."""
    dim: list[str] = []
    missing = size
    while missing > 1:
        axis = flat.pop(0)
        extent = spelling.sizes[axis]
        if extent < 1 or (axis == SAMPLE and missing % extent):
            return None
        if missing % extent and extent % missing:
            return None
        if extent > missing:
            parts = spelling.split(axis, missing)
            flat.insert(0, parts[1])
            axis, extent = parts[0], missing
        dim.append(axis)
        missing //= extent
    return dim or [spelling.fresh(1)]


def _reshape_sliced(node: Node, spelling: Spelling) -> bool:
    """Only dims of size 1 may come and go around a slice."""
    before, after = list(value(arguments(node)[0]).shape), list(value(node).shape)
    if [s for s in before if s != 1] != [s for s in after if s != 1]:
        return False
    kept = [dim for dim, size in zip(spelling.dims, after, strict=True) if size != 1]
    spelling.dims = [kept.pop(0) if size != 1 else [spelling.fresh(1)] for size in before]
    return True


def _expand(node: Node, spelling: Spelling) -> bool:
    source = value(arguments(node)[0]).shape
    lead = len(spelling.dims) - len(source)
    dims = []
    for dim, size in zip(spelling.dims[lead:], source, strict=True):
        grown = math.prod(spelling.sizes[axis] for axis in dim) != int(size)
        dims.append([spelling.fresh(1)] if grown else dim)
    spelling.dims = dims
    return True


def _select(node: Node, spelling: Spelling) -> bool:
    shape = value(arguments(node)[0]).shape
    dim, index = int(arguments(node)[1]) % len(shape), int(arguments(node)[2])
    axis = spelling.fresh(1)
    spelling.slices[axis] = (index % int(shape[dim]), int(shape[dim]))
    spelling.dims.insert(dim, [axis])
    return True


def _slice(node: Node, spelling: Spelling) -> bool:
    shape = value(arguments(node)[0]).shape
    dim, start, step = argument(node, 1, "dim", 0), argument(node, 2, "start"), argument(node, 4, "step", 1)
    dim, whole = dim % len(shape), int(shape[dim])
    first = min(max(start + whole if (start or 0) < 0 else start or 0, 0), whole)
    return step == 1 and _part(spelling, dim, first, int(value(node).shape[dim]), whole)


def _part(spelling: Spelling, dim: int, first: int, count: int, whole: int) -> bool:
    if count == whole:
        return True
    if len(spelling.dims[dim]) != 1 or spelling.dims[dim][0] in (SAMPLE, *spelling.slices):
        return False
    spelling.slices[spelling.dims[dim][0]] = (first, whole)
    return True


def _piece(node: Node, spelling: Spelling) -> bool:
    """``getitem`` of a split, chunk or unbind."""
    source, index = arguments(node)
    shape = value(arguments(source)[0]).shape
    dim = argument(source, 2, "dim", 0) % len(shape)
    if source.target is aten.unbind.int:
        dim = argument(source, 1, "dim", 0) % len(shape)
        axis = spelling.fresh(1)
        spelling.slices[axis] = (index % int(shape[dim]), int(shape[dim]))
        spelling.dims.insert(dim, [axis])
        return True
    first = sum(int(piece.shape[dim]) for piece in value(source)[:index])
    return _part(spelling, dim, first, int(value(node).shape[dim]), int(shape[dim]))


def _chosen(node: Node, spelling: Spelling) -> bool:
    """Rows by ids that are the same for all samples: position tables. Their dims become tokens."""
    selects = node.target is aten.index_select.default
    table, ids = arguments(node)[0], arguments(node)[2 if selects else 1]
    if (selects and arguments(node)[1] != 0) or not isinstance(ids, Node):
        return False
    ignored = -1 if selects else int(argument(node, 2, "padding_idx", -1))
    if any(axis in spelling.slices for dim in spelling.dims for axis in dim) or len(arguments(node)) > 3:
        return False
    count = value(ids).dim()
    # A dim that was broadcast has an axis of one entry that no factor knows.
    places = tuple(axis for dim in spelling.dims[:count] for axis in dim if spelling.sizes[axis] != 1)
    classes = int(value(table).shape[0])
    row = spelling.fresh(classes)
    spelling.choices.append((ids, (*places, row), OneHot(classes, ignored)))
    spelling.dims = [[row], *spelling.dims[count:]]
    return True


def _sum(node: Node, spelling: Spelling) -> bool:
    """``w + c``: nothing changes, unless ``w`` is broadcast."""
    source = _shifted(node)
    return source is not None and same_shape(value(node).shape, value(source).shape)


def _shifted(node: Node) -> Node | None:
    """The one operand of a sum that parameters reach; the derivative by it is one."""
    reached = [arg for arg in arguments(node)[:2] if isinstance(arg, Node) and _is_learned(arg)]
    return reached[0] if len(reached) == 1 and node.kwargs.get("alpha", 1) == 1 else None


def _is_learned(node: Node) -> bool:
    return any("parameter" in source.meta for source in ancestors(node))


_SUMS = {aten.add.Tensor, aten.add.Scalar}
_PIECES = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int}

PULLBACKS: dict[Any, Callable[[Node, Spelling], bool]] = {
    **dict.fromkeys((aten.clone.default, aten.alias.default, aten.contiguous.default), _same),
    **dict.fromkeys(_SUMS, _sum),
    **dict.fromkeys((aten.t.default, aten.numpy_T.default, aten.transpose.int, aten.permute.default), _permute),
    **dict.fromkeys(
        (
            aten.reshape.default,
            aten.view.default,
            aten.flatten.using_ints,
            aten.unflatten.int,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.unsqueeze.default,
        ),
        _reshape,
    ),
    aten.expand.default: _expand,
    aten.embedding.default: _chosen,
    aten.index_select.default: _chosen,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    operator.getitem: _piece,
}


def _is_float(node: Node) -> bool:
    held = value(node)
    return bool(isinstance(held, torch.Tensor) and held.is_floating_point())


def pull_back(node: Node, spelling: Spelling) -> Node | None:
    """Move ``spelling`` from ``node`` to the parameter it is a view of; ``None`` where it is more than a view."""
    while node.op != "placeholder":
        rule = PULLBACKS.get(node.target)
        if node.target is aten._to_copy.default:
            rule = _same if _is_float(node) and _is_float(node.all_input_nodes[0]) else None
        source = arguments(node)[0] if arguments(node) else None
        if node.target is operator.getitem:
            source = arguments(source)[0] if isinstance(source, Node) and source.target in _PIECES else None
        if node.target in _SUMS:
            source = _shifted(node)
        if rule is None or not isinstance(source, Node) or not rule(node, spelling):
            return None
        node = source
    return node
