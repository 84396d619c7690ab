"""From terms and tensors to a Gramian: plain torch operations, to run or to trace."""

from __future__ import annotations

import math
from collections.abc import Sequence

import opt_einsum
import torch
from torch import Tensor

from gramfx.align import canonical, disjoint, groups, merged
from gramfx.forms import OneHot, Windows
from gramfx.terms import Factor, ParameterTerms, Term

#: A tensor with the names of its dims.
Named = tuple[Tensor, tuple[str, ...]]
#: A term and the tensors its factors point at.
Held = tuple[Term, Sequence[Tensor]]


def gramian_of(terms: ParameterTerms, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The parameter's summand ``J Jᵀ`` of the Gramian, ``[m, m]``, accumulated in ``dtype``.

    tensors: what the factors of the terms point at.
    """
    contract = _by_rows if terms.strategy == "outer" else _by_pairs
    if terms.cross:
        return contract(_merge_all(terms.terms, tensors, dtype), terms.shape, dtype)
    blocks = [contract([(term, tensors)], terms.shape, dtype) for term in terms.terms]
    return torch.stack(blocks).sum(0) if len(blocks) > 1 else blocks[0]


def _merge_all(terms: Sequence[Term], tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Held]:
    return [_merge(group, tensors, dtype) if len(group) > 1 else (group[0], tensors) for group in groups(terms)]


def _merge(group: Sequence[Term], tensors: Sequence[Tensor], dtype: torch.dtype) -> Held:
    """Several terms as one, their tokens laid end to end."""
    made = [_joined([(term.factors[i], term) for term in group], tensors, dtype) for i in range(len(group[0].factors))]
    return merged(group), made


def _joined(same: Sequence[tuple[Factor, Term]], tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    flat = []
    for factor, term in same:
        one_hot = isinstance(factor.view, OneHot)
        tensor, axes = _ids(factor, term, tensors) if one_hot else _dense(factor, term, tensors, dtype)
        kept = tuple(axis for axis in canonical(factor, term) if axis in axes)
        order = [axes.index(axis) for axis in (*kept, *term.tokens)]
        tensor = tensor.permute(order)
        flat.append(tensor.reshape(*tensor.shape[: len(kept)], -1))
    if len(same[0][1].factors) == 1:
        return torch.stack([tensor.sum(-1) for tensor in flat]).sum(0)
    return torch.cat(flat, -1)


def _by_rows(group: Sequence[Held], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    jacobian = parameter_rows(group[0][0], shape, group[0][1], dtype)
    for term, tensors in group[1:]:
        jacobian = jacobian + parameter_rows(term, shape, tensors, dtype)
    flat = jacobian.reshape(jacobian.shape[0], math.prod(shape))
    return flat @ flat.t()


def parameter_rows(term: Term, shape: tuple[int, ...], tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The term's summand of the Jacobian, ``[m, *shape]``."""
    operands = _operands(term, tensors, dtype)
    for factor in _one_hots(term):
        operands.append(_matrix(factor, term, tensors, dtype))
    present = {axis for _, axes in operands for axis in axes}
    rows = _einsum(operands, (*term.rows, *(axis for axis in term.parameter if axis in present)))
    rows = rows.reshape(*rows.shape[: len(term.rows)], *(term.sizes[axis] for axis in term.parameter))
    for at, axis in enumerate(term.parameter, start=len(term.rows)):
        if axis in term.slices:
            offset, whole = term.slices[axis]
            rows = _padded(rows, at, offset, whole - offset - term.sizes[axis])
    return rows.reshape(math.prod(rows.shape[: len(term.rows)]), *shape)


def _by_pairs(group: Sequence[Held], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    total: Tensor | None = None
    for i, left in enumerate(group):
        for right in group[i:]:
            if not disjoint(left[0], right[0]):
                block = _pair(left, right, dtype)
                block = block if right is left else block + block.t()
                total = block if total is None else total + block
    assert total is not None
    return total


def _pair(left: Held, right: Held, dtype: torch.dtype) -> Tensor:
    """``J_left J_rightᵀ``."""
    mine, other = left[0], beside(right[0])
    operands = _meet([(mine, left[1]), (other, right[1])], dtype)
    block = _einsum(operands, (*mine.rows, *other.rows))
    count = math.prod(block.shape[: len(mine.rows)])
    return block.reshape(count, math.prod(block.shape[len(mine.rows) :]))


def beside(term: Term) -> Term:
    """The right-hand term of a pair: the parameter's axes are shared, all others are its own."""
    return term.renamed({axis: f"{axis}'" for axis in term.sizes if axis not in term.parameter})


# ---------------------------------------------------------------- factors


def _dense(factor: Factor, term: Term, tensors: Sequence[Tensor], dtype: torch.dtype) -> Named:
    tensor = tensors[factor.tensor]
    if isinstance(factor.view, Windows):
        tensor = windows(tensor, factor.view)
    return _shaped(tensor, factor.axes, term).to(dtype), factor.axes


def _shaped(tensor: Tensor, axes: tuple[str, ...], term: Term) -> Tensor:
    """The tensor with one dim an axis; left alone where it has them, since a reshape may fix a symbolic batch."""
    if tensor.dim() == len(axes):
        return tensor
    return tensor.reshape([term.sizes[axis] for axis in axes])


def windows(source: Tensor, view: Windows) -> Tensor:
    """The patches a kernel sees, a view of the padded source: ``[..., *L] -> [..., *out, *kernel]``."""
    lead = source.dim() - len(view.kernel)
    dims = list(zip(view.kernel, view.stride, view.padding, view.dilation, view.out, strict=True))
    for at, (kernel, stride, padding, dilation, out) in enumerate(dims, lead):
        reach = (out - 1) * stride + (kernel - 1) * dilation + 1
        source = _padded(source, at, padding, max(0, reach - int(source.shape[at]) - padding))
        source = source.unfold(at, (kernel - 1) * dilation + 1, stride).narrow(at, 0, out)[..., ::dilation]
    return source


def _padded(source: Tensor, at: int, before: int, after: int) -> Tensor:
    """Zeros around dim ``at``; ``F.pad`` would fix a symbolic batch."""
    sides = [source.new_zeros([*source.shape[:at], size, *source.shape[at + 1 :]]) for size in (before, after)]
    return torch.cat([sides[0], source, sides[1]], at) if before or after else source


def _ids(factor: Factor, term: Term, tensors: Sequence[Tensor]) -> Named:
    axes = factor.axes[:-1]
    return _shaped(tensors[factor.tensor], axes, term), axes


def _one_hots(term: Term) -> list[Factor]:
    return [factor for factor in term.factors if isinstance(factor.view, OneHot)]


def _operands(term: Term, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Named]:
    """All factors but the one-hot ones, and a mask of the ids that count, where some do not."""
    found = []
    for factor in term.factors:
        if not isinstance(factor.view, OneHot):
            found.append(_dense(factor, term, tensors, dtype))
        elif factor.view.ignored >= 0:
            ids, axes = _ids(factor, term, tensors)
            found.append(((ids != factor.view.ignored).to(dtype), axes))
    return found


def _matrix(factor: Factor, term: Term, tensors: Sequence[Tensor], dtype: torch.dtype) -> Named:
    """For rows of the Jacobian: the one-hot matrix itself."""
    assert isinstance(factor.view, OneHot)
    ids, axes = _ids(factor, term, tensors)
    classes = torch.arange(factor.view.classes, device=ids.device)
    return (ids.unsqueeze(-1) == classes).to(dtype), (*axes, factor.axes[-1])


def _meet(sides: Sequence[Held], dtype: torch.dtype) -> list[Named]:
    """The operands of a pair, one-hot factors resolved: equal ids meet by comparison, others by gathering."""
    dense = [operand for term, tensors in sides for operand in _operands(term, tensors, dtype)]
    chosen = [(f.axes[-1], _ids(f, term, tensors)) for term, tensors in sides for f in _one_hots(term)]
    for axis in dict.fromkeys(name for name, _ in chosen):
        ids = [found for name, found in chosen if name == axis]
        if len(ids) == 2:
            (a, a_axes), (b, b_axes) = ids
            equal = a.reshape(*a.shape, *(1,) * b.dim()) == b
            dense.append((equal.to(dtype), (*a_axes, *b_axes)))
        else:
            dense = [_gathered(entry, axis, *ids[0]) if axis in entry[1] else entry for entry in dense]
    return dense


def _gathered(entry: Named, axis: str, ids: Tensor, id_axes: tuple[str, ...]) -> Named:
    tensor, axes = entry
    at = axes.index(axis)
    taken = tensor.index_select(at, ids.reshape(-1))
    return taken.unflatten(at, list(ids.shape)), (*axes[:at], *id_axes, *axes[at + 1 :])


def _einsum(operands: Sequence[Named], out: tuple[str, ...]) -> Tensor:
    """One einsum, contracted two operands at a time along the path that opt_einsum finds."""
    symbols = {
        axis: opt_einsum.get_symbol(i) for i, axis in enumerate(dict.fromkeys(a for _, x in operands for a in x))
    }
    spell = ["".join(symbols[axis] for axis in axes) for _, axes in operands]
    result = "".join(symbols[axis] for axis in out)
    shapes = [tuple(_hint(size) for size in tensor.shape) for tensor, _ in operands]
    path, _ = opt_einsum.contract_path(",".join(spell) + "->" + result, *shapes, shapes=True, optimize="auto")
    tensors = [tensor for tensor, _ in operands]
    for step in path:
        picked = [(tensors.pop(i), spell.pop(i)) for i in sorted(step, reverse=True)]
        kept = set(result).union(*spell)
        made = result if not spell else "".join(c for c in dict.fromkeys("".join(s for _, s in picked)) if c in kept)
        tensors.append(torch.einsum(",".join(s for _, s in picked) + "->" + made, *(t for t, _ in picked)))
        spell.append(made)
    return tensors[0]


def _hint(size: int | torch.SymInt) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size
