"""Ops that only say where entries lie: views, cuts along a dim, and joins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gramfx.axes import Loc, Size, Value, product, quotient, relocate, size_of
from gramfx.rules.table import Call, Label, Operand, Rule, define, right_aligned


def reshape(call: Call) -> Value:
    """The same entries in row-major order under another shape."""
    operand, *others = call.operands
    call.seen.update(id(o) for o in others)  # view_as and the like: only their shape counts
    loc, iota = operand.batch, operand.value.iota
    moved = None if loc is None else relocate(loc, operand.shape, call.shape, call.batch)
    call.placed(operand, moved, "is split by a view across the batch")
    return Value(
        call.shape, call.floating and operand.value.differentiable, moved, iota and _whole(iota, operand, call.shape)
    )


def _whole(iota: Loc, operand: Operand, shape: Sequence[Size]) -> Loc | None:
    """The digit of an ``arange`` in the new shape, if it still is the top digit of one dim."""
    extent = quotient(operand.shape[iota.dim], iota.inner)
    moved = None if extent is None else relocate(iota, operand.shape, shape, extent)
    return moved if moved is not None and extent is not None and shape[moved.dim] == moved.inner * extent else None


def moving(order: Callable[[Call, int], list[int]]) -> Rule:
    """Dims change places: output dim d is input dim ``order[d]``."""

    def rule(call: Call) -> Value:
        (operand,) = call.operands
        dims = [dim % max(operand.rank, 1) for dim in order(call, operand.rank)]
        move = lambda loc: None if loc is None else Loc(dims.index(loc.dim), loc.inner)  # noqa: E731
        call.placed(operand, move(operand.batch), "is moved across the batch")
        return call.result(move(operand.batch), move(operand.value.iota))

    return rule


def _swapped(rank: int, first: int, second: int) -> list[int]:
    dims = list(range(rank))
    if rank:
        dims[first], dims[second] = dims[second], dims[first]
    return dims


def _moved(call: Call, rank: int) -> list[int]:
    pairs = [call.args["source"], call.args["destination"]]
    source, target = ([d % rank for d in (p if isinstance(p, (list, tuple)) else [p])] for p in pairs)
    rest = iter(d for d in range(rank) if d not in source)
    placed = dict(zip(target, source, strict=True))
    return [placed[d] if d in placed else next(rest) for d in range(rank)]


def repeat(call: Call) -> Value:
    """``out[i] = x[i % size]`` in every dim: a digit of i below the size is the same digit of x."""
    (operand,) = call.operands
    loc, shift = operand.batch, len(call.shape) - operand.rank
    place = None if loc is None else Loc(loc.dim + shift, loc.inner)
    call.placed(operand, place, "is repeated across the batch")
    return call.result(place)


def repeat_interleave(call: Call) -> Value:
    """``out[i] = x[i // repeats]`` along ``dim``, or in the flat index without one."""
    (operand,) = call.operands
    loc = operand.batch
    if loc is None:
        return call.result(None)
    if call.get("dim") is None:
        loc = Loc(0, size_of(loc.inner * product(operand.shape[loc.dim + 1 :]) * call.args["repeats"]))
    elif loc.dim == call.args["dim"] % operand.rank:
        loc = Loc(loc.dim, size_of(loc.inner * call.args["repeats"]))
    call.placed(operand, loc, "is repeated across the batch")
    return call.result(loc)


def _cut(call: Call, dim: int, start: Size, step: Size = 1) -> Value:
    """``out[i] = x[start + i * step]`` along ``dim``: whole periods of the digit, or steps below one sample."""
    operand = call.first
    loc = operand.batch
    if loc is not None and loc.dim == dim and operand.shape != call.shape:
        whole = step == 1 and quotient(start, loc.inner * call.batch) is not None
        inner = loc.inner if whole else quotient(loc.inner, step)
        below = isinstance(start, int) and isinstance(step, int) and 0 <= start < step
        loc = Loc(dim, inner) if inner is not None and (whole or below) else None
    loc = call.placed(operand, loc, "is cut along the batch")
    return call.result(loc)


def cut_slice(call: Call) -> Value:
    """``x[start:end:step]`` along ``dim``."""
    operand = call.first
    dim = call.args["dim"] % operand.rank
    start = call.args["start"] or 0
    return _cut(
        call,
        dim,
        size_of(start + operand.shape[dim]) if isinstance(start, int) and start < 0 else start,
        call.args["step"],
    )


def cut_narrow(call: Call) -> Value:
    """``length`` entries from ``start`` on along ``dim``."""
    operand, *position = call.operands
    call.seen.update(id(o) for o in position)
    dim, start = call.args["dim"] % operand.rank, call.args["start"]
    start = 1 if isinstance(start, Operand) else start  # unknown: no period starts there for sure
    return _cut(call, dim, size_of(start + operand.shape[dim]) if isinstance(start, int) and start < 0 else start)


def cut_parts(default: int = 0) -> Rule:
    """Consecutive parts along ``dim``: part k starts where the parts before it end."""

    def rule(call: Call) -> Value:
        operand, *sections = call.operands
        call.seen.update(id(o) for o in sections)
        dim = call.get("dim", default) % operand.rank
        if default == 1 and operand.rank == 1:
            dim = 0  # hsplit of a vector
        return _cut(call, dim, sum((shape[dim] for shape in call.shapes[: call.index]), 0))

    return rule


def select(call: Call) -> Value:
    """``x[index]`` along ``dim``, which vanishes."""
    operand, *position = call.operands
    call.seen.update(id(o) for o in position)
    return drop(call, operand, {call.get("dim", 0) % operand.rank})


def drop(call: Call, operand: Operand, dims: set[int], added: int = 0) -> Value:
    """These dims vanish, ``added`` new ones come last."""
    output: list[Label] = [d for d in range(operand.rank) if d not in dims]
    return call.labelled([(operand, tuple(range(operand.rank)))], output + [None] * added)


def diagonal(call: Call) -> Value:
    """Two dims vanish, their diagonal comes last."""
    pair = [call.get(name, default) for name, default in (("dim1", -2), ("dim2", -1))]
    return drop(call, call.first, {d % call.first.rank for d in pair}, added=1)


def diag_embed(call: Call) -> Value:
    """The last dim becomes the diagonal of two new dims."""
    rank = len(call.shape)
    pair = {call.args["dim1"] % rank, call.args["dim2"] % rank}
    leading = iter(range(rank - 2))
    output = [None if d in pair else next(leading) for d in range(rank)]
    return call.labelled([(call.first, tuple(range(call.first.rank)))], output)


def unfold(call: Call) -> Value:
    """``dim`` becomes a dim of windows, whose entries come last."""
    (operand,) = call.operands
    dim = call.args["dimension"] % max(operand.rank, 1)
    output = [None if d == dim else d for d in range(operand.rank)]
    return call.labelled([(operand, tuple(range(operand.rank)))], [*output, None][: len(call.shape)])


def prefix(call: Call) -> Value:
    """The first dims stay; a last dim of real and imaginary parts, or of classes, comes or goes."""
    (operand,) = call.operands
    output: list[Label] = [d if d < operand.rank else None for d in range(len(call.shape))]
    return call.labelled([(operand, tuple(range(operand.rank)))], output)


def stack(call: Call) -> Value:
    """A new dim tells the tensors apart."""
    rank = len(call.shape)
    dim = call.get("dim", 0) % rank
    output: list[Label] = [None if d == dim else d - (d > dim) for d in range(rank)]
    return call.labelled([(o, tuple(range(o.rank))) for o in call.operands], output)


def concatenate(dim_of: Callable[[Call], int]) -> Rule:
    """Tensors one after the other along a dim; along the batch each must fill whole periods of the digit."""

    def rule(call: Call) -> Value:
        dim = dim_of(call)
        places: list[tuple[Operand, Loc | None]] = []
        offset: Size = 0
        for operand in call.operands:
            loc = operand.batch
            along = operand.rank == len(call.shape)
            if loc is not None and (not along or (loc.dim == dim and quotient(offset, loc.inner * call.batch) is None)):
                loc = call.placed(operand, None, "is joined out of step with the batch")
            places.append((operand, call.placed(operand, loc, "is joined along the batch")))
            offset = offset + (operand.shape[dim] if along else 0)
        return call.joined(places)

    return rule


def meshgrid(call: Call) -> Value:
    """``out_k[i, j, …] = x_k[its own index]``."""
    swapped = call.get("indexing") == "xy" and len(call.operands) > 1
    order = [1, 0, *range(2, len(call.operands))] if swapped else list(range(len(call.operands)))
    listed = [(o, (at,) * o.rank if at == call.index else None) for at, o in enumerate(call.operands)]
    return call.labelled(listed, order)


def summed_to(call: Call) -> Value:
    """Broadcasting undone: the dims it made are summed."""
    (operand,) = call.operands
    names = right_aligned(len(call.shape), operand.rank)
    shrunk = [
        n if call.shape[at] == operand.shape[operand.rank - len(call.shape) + at] else None
        for at, n in enumerate(names)
    ]
    return call.labelled([(operand, tuple(range(operand.rank)))], shrunk)


define("view reshape _unsafe_view flatten unflatten _reshape_alias view_as reshape_as ravel view_copy", reshape)
define("squeeze unsqueeze squeeze_copy unsqueeze_copy atleast_1d atleast_2d atleast_3d _reshape_copy", reshape)
define("permute permute_copy", moving(lambda call, rank: call.args["dims"]))
define("transpose transpose_copy", moving(lambda call, rank: _swapped(rank, call.args["dim0"], call.args["dim1"])))
define("swapaxes", moving(lambda call, rank: _swapped(rank, call.args["axis0"], call.args["axis1"])))
define("swapdims", moving(lambda call, rank: _swapped(rank, call.args["dim0"], call.args["dim1"])))
define("t t_copy numpy_T matrix_H", moving(lambda call, rank: list(reversed(range(rank)))))
define("mT mH adjoint", moving(lambda call, rank: _swapped(rank, -2, -1)))
define("movedim moveaxis", moving(_moved))
define("repeat", repeat)
define("tile", repeat)
define("repeat_interleave.self_int", repeat_interleave)
define("slice", cut_slice)
define("narrow narrow_copy", cut_narrow)
define("split split_with_sizes split_with_sizes_copy split_copy chunk unsafe_chunk unsafe_split", cut_parts())
define("unsafe_split_with_sizes tensor_split vsplit", cut_parts())
define("hsplit", cut_parts(1))
define("dsplit", cut_parts(2))
define("select select_copy unbind unbind_copy", select)
define("diagonal diagonal_copy linalg_diagonal", diagonal)
define("diag_embed", diag_embed)
define("unfold unfold_copy", unfold)
define("view_as_real view_as_complex one_hot", prefix)
define("stack", stack)
define("cat concat concatenate", concatenate(lambda call: call.args["dim"] % len(call.shape)))
define("vstack", concatenate(lambda call: 0))
define("hstack", concatenate(lambda call: 1 if len(call.shape) > 1 else 0))
define("column_stack", concatenate(lambda call: 1))
define("dstack", concatenate(lambda call: 2))
define("meshgrid", meshgrid)
define("sum_to_size", summed_to)
