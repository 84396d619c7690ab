"""Reads and writes at indices: a dim that is not indexed stays; an indexed one is followed only through an arange."""

from __future__ import annotations

import torch

from gramfx.axes import Loc, Size, Value, holds, quotient, size_of
from gramfx.rules.table import Call, Label, Labels, Operand, define, equation

MASKS = (torch.bool, torch.uint8)
CROSSES = "is indexed across samples"


def _through(call: Call, loc: Loc, size: Size, indices: Operand) -> Loc | None:
    """Where a digit of an indexed dim lies among the indices, if these count over the whole dim.

    An index ``k = (i // iota.inner) % size`` gives the sample ``(k // loc.inner) % B``: again a digit of i.
    """
    iota = indices.value.iota
    if iota is None or quotient(indices.shape[iota.dim], iota.inner) != size:
        return None
    return Loc(iota.dim, size_of(iota.inner * loc.inner))


def _indexed_dims(call: Call, rank: int) -> tuple[list[int], int, int]:
    """Which dims ``index`` reads at indices, where the indices' broadcast dims go, and how many these are."""
    indices = call.args["indices"]
    dims = [at for at, index in enumerate(indices) if index is not None]
    width = max((indices[d].rank for d in dims), default=0)
    adjacent = dims == list(range(dims[0], dims[-1] + 1)) if dims else True
    return dims, (dims[0] if adjacent and dims else 0), width


def _layout(dims: list[int], start: int, width: int, rank: int) -> Labels:
    """The dims of the picked values: source dims by number, the indices' broadcast dims as ``i0, i1, …``."""
    rest: list[Label] = [d for d in range(rank) if d not in dims]
    return [*rest[:start], *(f"i{d}" for d in range(width)), *rest[start:]]


def index(call: Call) -> Value:
    """``out[rest, i] = x[rest, indices[i]]``."""
    source = call.args["self"]
    masks = [o for o in call.operands[1:] if o.value.shape and len(call.shape) and _is_mask(o)]
    dims, start, width = _indexed_dims(call, source.rank)
    if masks:
        call.placed(source, None, CROSSES)
        return _ignore(call, call.operands[1:], call.result(None))
    layout = list(_layout(dims, start, width, source.rank))
    loc = source.batch
    place: Loc | None = None
    if loc is not None and loc.dim not in dims:
        place = Loc(layout.index(loc.dim), loc.inner)
    elif loc is not None:
        indices = call.args["indices"][loc.dim]
        found = _through(call, loc, source.shape[loc.dim], indices)
        place = found and Loc(layout.index(f"i{found.dim + width - indices.rank}"), found.inner)
    places = [(source, call.placed(source, place, CROSSES))]
    for o in call.operands[1:]:
        moved = o.batch and Loc(layout.index(f"i{o.batch.dim + width - o.rank}"), o.batch.inner)
        places.append((o, moved if moved and holds(call.shape[moved.dim], moved.inner, call.batch) else None))
    return call.joined(places)


def _is_mask(operand: Operand) -> bool:
    return operand.node.meta["val"].dtype in MASKS


def _ignore(call: Call, operands: list[Operand], value: Value) -> Value:
    """These operands hold no derivative: only their numbers matter."""
    call.seen.update(id(o) for o in operands)
    return value


def index_put(call: Call) -> Value:
    """``out = x`` but at the indices, where ``values`` go: each entry of x keeps its place."""
    source, values = call.args["self"], call.args["values"]
    positions = [o for o in call.operands if o is not source and o is not values]
    if any(_is_mask(o) for o in positions):
        return _ignore(
            call, positions, call.joined([(source, source.batch), (values, call.placed(values, None, CROSSES))])
        )
    dims, start, width = _indexed_dims(call, source.rank)
    layout = list(_layout(dims, start, width, source.rank))
    place: Loc | None = None
    if values.batch is not None:
        label = layout[values.batch.dim + len(layout) - values.rank]
        place = Loc(label, values.batch.inner) if isinstance(label, int) else _landing(call, source, label, width)
    places = [(source, source.batch), (values, call.placed(values, place, CROSSES))]
    return _ignore(call, positions, call.joined(places))


def _landing(call: Call, source: Operand, label: Label, width: int) -> Loc | None:
    """Where values written along an index dim land: known where an ``arange`` over a whole dim says so."""
    values = call.args["values"]
    for dim, indices in enumerate(call.args["indices"]):
        iota = indices.value.iota if indices is not None else None
        if iota is None or f"i{iota.dim + width - indices.rank}" != label or iota.inner != 1:
            continue
        if indices.shape[iota.dim] == source.shape[dim]:
            return Loc(dim, values.batch.inner)
    return None


def gather(call: Call) -> Value:
    """``out[i, d, j] = x[i, indices[i, d, j], j]``; indices may be shorter than x in the other dims."""
    source, indices = call.operands
    place = source.batch
    if place is not None and place.dim in call.dims():
        place = None
    call.seen.add(id(indices))
    return call.joined([(source, call.placed(source, place, CROSSES)), (indices, indices.batch)])


def scatter(call: Call) -> Value:
    """``out[i, indices[i, d, j], j] = src[i, d, j]`` over a copy of x."""
    source, indices, *written = call.operands
    (dim,) = call.dims()
    places = [(source, source.batch)]
    for o in written:
        stays = o.batch is not None and o.batch.dim != dim
        places.append((o, call.placed(o, o.batch if stays else None, CROSSES)))
    return _ignore(call, [indices], call.joined(places))


def index_select(call: Call) -> Value:
    """``out[d] = x[indices[d]]`` along ``dim``."""
    source, indices = call.operands
    (dim,) = call.dims()
    place = source.batch
    if place is not None and place.dim == dim:
        found = _through(call, place, source.shape[dim], indices)
        place = found and Loc(dim, found.inner)
    rows = indices.batch and Loc(dim, indices.batch.inner)
    return call.joined([(source, call.placed(source, place, CROSSES)), (indices, rows)])


def index_write(call: Call) -> Value:
    """``out[indices[d]] = f(x, values[d])`` along ``dim``: each entry of x keeps its place."""
    source, indices, *written = call.operands
    (dim,) = call.dims()
    places = [(source, source.batch)]
    for o in written:
        place = o.batch
        if place is not None and place.dim == dim and o.rank == source.rank:
            whole = indices.value.iota == Loc(0, 1) and indices.shape[0] == source.shape[dim]
            place = place if whole else None
        places.append((o, call.placed(o, place if o.rank == source.rank else None, CROSSES)))
    return _ignore(call, [indices], call.joined(places))


def written_view(call: Call) -> Value:
    """A copy of x with a slice, row or diagonal replaced; ``src`` may share only whole dims with it."""
    source, written = call.operands
    dims = {d % source.rank for name in ("dim", "dim1", "dim2") if (d := call.get(name)) is not None}
    place = None
    if written.batch is not None:
        names = (
            list(range(source.rank))
            if written.rank == source.rank
            else [d for d in range(source.rank) if d not in dims]
        )
        diagonal = "dim1" in call.args
        dim = names[written.batch.dim] if written.batch.dim < len(names) else None
        whole = (
            dim is not None and (dim not in dims or source.shape == written.shape) and not (diagonal and dim in dims)
        )
        place = Loc(dim, written.batch.inner) if whole and dim is not None else None
    return call.joined([(source, source.batch), (written, call.placed(written, place, CROSSES))])


def kept_entries(call: Call) -> Value:
    """A copy of x, broadcast to the mask, that takes entries from ``source`` one after the other where it is set."""
    data, mask, source = call.operands
    place = data.batch and Loc(data.batch.dim + len(call.shape) - data.rank, data.batch.inner)
    return _ignore(call, [mask], call.joined([(data, place), (source, call.placed(source, None, CROSSES))]))


def embedding_bag(call: Call) -> Value:
    """``out[bag, d] = Σ w[ids, d]``: ids hold no derivative, so a bag's sample may be read off its place."""
    table, ids, offsets, *weights = call.operands
    for operand in (table, *weights):
        call.placed(operand, None, "is summed into bags")
    bags = call.shape[0]
    by_offsets = offsets.batch
    period = quotient(ids.shape[0], bags) if ids.rank == 1 else 1
    inner = quotient(ids.batch.inner, period) if ids.batch is not None and period is not None else None
    place = by_offsets or (Loc(0, inner) if inner is not None else Loc(0, 1) if ids.batch is not None else None)
    if place is None or not holds(bags, place.inner, call.batch):
        place = None
    call.seen.update((id(ids), id(offsets)))
    return call.result(place)


define("embedding", equation("vd, ... -> ...d"))
define("embedding_dense_backward", equation("...d, ... -> vd"))
define("index _unsafe_index", index)
define("index_put _unsafe_index_put", index_put)
define("gather take_along_dim", gather)
define("scatter scatter_add scatter_reduce", scatter)
define("index_select", index_select)
define("index_add index_copy index_reduce index_fill", index_write)
define("select_scatter slice_scatter diagonal_scatter", written_view)
define("masked_scatter", kept_entries)
define("embedding_bag _embedding_bag _embedding_bag_forward_only", embedding_bag)
