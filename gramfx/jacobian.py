"""The Gramian of objectives that were computed, in eager code, from the outputs of compiled regions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from gramfx.autograd import Node, contiguous_all, reached_from
from gramfx.eager import TOLERANCE
from gramfx.errors import CoupledObjectivesError, DenseJacobianWarning, InputError, VerificationError
from gramfx.regions import SINGLE, Mode, batch_rows
from gramfx.source import warn_user
from gramfx.torch_compat import FakeTensor, autocast_off

#: Exponents of the powers of two that tell samples apart: so many at a time, as the range of the dtype allows.
_EXPONENTS = {torch.float64: 64, torch.float32: 32, torch.bfloat16: 32, torch.float16: 4}
#: Its own, so that nobody's random numbers change.
_GENERATOR = torch.Generator().manual_seed(0)


def gramian(
    objectives: Tensor,
    parameters: Sequence[nn.Parameter] | None = None,
    coupled: Literal["allow", "error"] = "allow",
) -> Tensor:
    """``J Jᵀ`` of objectives that were computed from outputs of models compiled with ``backend="gramfx"``.

    objectives: of any shape, in row-major order; the graph behind them stays usable. parameters: those that ``J`` is
    taken by; all ``nn.Parameter`` that the objectives depend on by default. coupled: ``"error"`` where objectives that
    do not belong to one sample each, or a region that mixes samples, shall be refused; exact either way. Returns
    ``[m, m]``, ``m = objectives.numel()``, in their dtype. Raises :class:`gramfx.errors.InputError` where there is no
    graph behind the objectives, or none of the parameters in it.
    """
    if isinstance(objectives, FakeTensor):
        # Dynamo asks for a shape; the call itself stays in its graph.
        return objectives.detach().new_empty((objectives.numel(), objectives.numel()))
    if not isinstance(objectives, Tensor) or objectives.grad_fn is None:
        raise InputError(
            "there is no graph behind the objectives",
            expected="a tensor computed from outputs of a compiled model, with gradients enabled",
            got=f"{type(objectives).__name__} without grad_fn",
            remedy="call the model with gradients enabled, and gramian before backward frees the graph",
        )
    if not objectives.numel():
        return objectives.new_zeros(0, 0)
    nodes, outside = reached_from(objectives)
    wanted = None if parameters is None else {id(parameter) for parameter in parameters}
    everywhere = [parameter for node in nodes for parameter in node.parameters.values()]
    known = {id(p): p for p in (*everywhere, *outside.values())}
    kept = {key: p for key, p in known.items() if wanted is None or key in wanted}
    if wanted is None and not kept:
        raise InputError(
            "the objectives depend on no parameter",
            expected="objectives computed with a compiled model that has trainable parameters",
            got="none behind them",
        )
    counts = [id(parameter) for parameter in everywhere]
    dense = {key: p for key, p in kept.items() if key in outside or counts.count(key) > 1}
    excluded = set(known) - (set(kept) - set(dense))
    with torch.no_grad():
        pull = _Pull(objectives, nodes, coupled)
        total = objectives.new_zeros(pull.count, pull.count)
        for number, node in enumerate(nodes):
            if any(id(parameter) not in excluded for parameter in node.parameters.values()):
                total += pull.gramian_of(number, node.names(excluded)).to(total)
    return total + _dense(objectives, dense).to(total) if dense else total


def _dense(objectives: Tensor, parameters: dict[int, Tensor]) -> Tensor:
    """``J Jᵀ`` by the rows of ``J``: for parameters that several regions read, or code outside of them."""
    shapes = ", ".join(str(tuple(parameter.shape)) for parameter in parameters.values())
    warn_user(
        DenseJacobianWarning(
            f"parameters of shape {shapes} are read by several compiled regions, or outside of them: their rows of the "
            "Jacobian are formed one by one. Exact all the same; compile the model as a whole to avoid it."
        )
    )
    leaves = list(parameters.values())
    rows = []
    for seed in _units(objectives):
        found = torch.autograd.grad(objectives, leaves, seed, retain_graph=True, allow_unused=True)
        made = [torch.zeros_like(p) if g is None else g for g, p in zip(found, leaves, strict=True)]
        real = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in made]
        rows.append(torch.cat([g.reshape(-1).to(objectives.dtype) for g in real]))
    jacobian = torch.stack(rows)
    return jacobian @ jacobian.T


def _units(objectives: Tensor) -> Iterator[Tensor]:
    for index in range(objectives.numel()):
        seed = torch.zeros_like(objectives).reshape(-1)
        seed[index] = 1
        yield seed.reshape(objectives.shape)


class _Pull:
    """Cotangents of all regions' outputs, by backward passes through the eager code around them."""

    def __init__(self, objectives: Tensor, nodes: Sequence[Node], coupled: str) -> None:
        self.objectives, self.nodes, self.coupled = objectives, nodes, coupled
        self.count = objectives.numel()
        self.singles: dict[tuple[int, int, int], tuple[list[list[list[Tensor]]], list[bool]]] = {}
        self.full: list[list[list[Tensor]]] | None = None

    def pulled(self, seed: Tensor) -> list[list[Tensor]]:
        """For each region the cotangents of its outputs."""
        edges = [edge for node in self.nodes for edge in node.edges]
        with torch.enable_grad():
            found = iter(torch.autograd.grad(self.objectives, edges, seed, retain_graph=True, allow_unused=True))
        return [[zero if (got := next(found)) is None else got for zero in node.zeros()] for node in self.nodes]

    def gramian_of(self, number: int, excluded: frozenset[str]) -> Tensor:
        """The summand of one region."""
        node = self.nodes[number]
        region, batch = node.region, node.ctx.batch
        if region.batched and batch is not None:
            for before, after in self._rows(batch):
                cotangents, apart = self._single(before, batch, after)
                if apart[number]:
                    each = [one[number] for one in cotangents]
                    several = before * after > 1
                    stacked = [torch.stack(same) for same in zip(*each, strict=True)] if several else each[0]
                    mode = Mode(before * after if several else 0, True, excluded)
                    return batch_rows(self._run(node, mode, stacked), before, batch, after)
        if self.coupled == "error":
            raise CoupledObjectivesError(
                "the objectives do not each depend on one sample's rows of the model's outputs",
                expected="objectives of which each belongs to one sample",
                got=f"objectives of shape {tuple(self.objectives.shape)} with a batch of {batch}",
                remedy="leave batch_dim out to have one cotangent per objective",
            )
        self.full = self.full or [self.pulled(seed) for seed in _units(self.objectives)]
        stacked = [torch.stack(same) for same in zip(*(one[number] for one in self.full), strict=True)]
        return self._run(node, Mode(self.count, False, excluded), stacked)

    def _rows(self, batch: int) -> Iterator[tuple[int, int]]:
        """How objectives may be rows ``before, batch, after``."""
        shape = self.objectives.shape
        found = [(math.prod(shape[:d]), math.prod(shape[d + 1 :])) for d, size in enumerate(shape) if size == batch]
        if self.count and self.count % batch == 0:
            found += [(1, self.count // batch), (self.count // batch, 1)]
        yield from dict.fromkeys(found)

    def _single(self, before: int, batch: int, after: int) -> tuple[list[list[list[Tensor]]], list[bool]]:
        """Cotangents of one objective a sample, ``before * after`` times, and which regions keep samples apart."""
        key = (before, batch, after)
        if key not in self.singles:
            found: list[list[list[Tensor]]] = []
            mine = [node.region.batched and node.ctx.batch == batch for node in self.nodes]
            alike: list[list[Tensor]] = [[] for _ in self.nodes]
            for index in range(before * after):
                rows = torch.zeros(before, batch, after, dtype=torch.float64)
                rows[index // after, :, index % after] = 1
                ones = self.pulled(rows.to(self.objectives).reshape(self.objectives.shape))
                found.append(ones)
                for scales in _scales(batch, self.objectives.dtype):
                    seed = (rows * scales.reshape(1, -1, 1)).to(self.objectives).reshape(self.objectives.shape)
                    scaled = self.pulled(seed)
                    for number, (node, one, other) in enumerate(zip(self.nodes, ones, scaled, strict=True)):
                        told = _alike(node, one, other, scales) if mine[number] else ()
                        alike[number] += [flag.to(self.objectives.device) for flag in told]
            # Read all at once: on a GPU each reading is waited for.
            apart = [flag and all(torch.stack(told).tolist()) for flag, told in zip(mine, alike, strict=True)]
            self.singles[key] = (found, apart)
        return self.singles[key]

    def _run(self, node: Node, mode: Mode, cotangents: Sequence[Tensor]) -> Tensor:
        region, slots = node.region, len(node.region.slots)
        held = contiguous_all(node.ctx.saved_tensors)
        draws = [held[slots + index] for index in region.draws]
        given = held if mode == SINGLE else [*held[:slots], *draws]
        program = region.gramian(mode, node.ctx.batch, self.coupled)
        batched = mode.batched and region.batched and node.ctx.batch is not None
        with autocast_off():
            (found,) = program.at(node.ctx.batch if batched else 1)(*given, *contiguous_all(cotangents))
            if program.untried:
                _confirm(node, mode, found, held, cotangents)
                program.passed()
        result: Tensor = found
        return result


def _scales(batch: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Powers of two, in several goes, by which any two samples are told apart in some go; drawn anew at each call."""
    base = _EXPONENTS.get(dtype, 32)
    order = torch.randperm(batch, generator=_GENERATOR)
    digits = max(1, math.ceil(math.log(max(batch, 2), base)))
    for digit in range(digits):
        yield torch.pow(2.0, (order // base**digit % base).double())


def _alike(node: Node, ones: Sequence[Tensor], scaled: Sequence[Tensor], scales: Tensor) -> Iterator[Tensor]:
    """Whether the cotangents of ``Σ r_b y_b`` are those of ``Σ y_b``, rows scaled by ``r``, bit for bit."""
    for place, one, other in zip(node.region.places, ones, scaled, strict=True):
        if place is None:
            yield ~(one.any() | other.any())
            continue
        shape = [1] * one.dim()
        shape[place] = -1
        want = one * scales.to(one).reshape(shape)
        # Below the smallest normal number a power of two rounds as well.
        tiny = (other - want).abs() <= torch.finfo(one.dtype).tiny * float(scales.max())
        yield ((other == want) | tiny | (other.isnan() & want.isnan())).all()


def _confirm(node: Node, mode: Mode, found: Tensor, held: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
    """At the first use: ``1ᵀ G 1`` must be the squared norm of the gradient of all objectives' sum."""
    region = node.region
    summed = [one.sum(0) if mode.count else one for one in cotangents]
    made = iter(region.gradient(*held, *contiguous_all(summed)))
    squares = 0.0
    for wanted, reached in zip(region.wanted, region.reached, strict=True):
        gradient = next(made) if reached else None
        name = wanted.meta.get("parameter")
        if gradient is not None and name is not None and name not in mode.excluded:
            squares += float(gradient.double().square().sum())
    got, scale = float(found.double().sum()), float(found.double().abs().sum())
    tolerance = max(TOLERANCE.get(tensor.dtype, 0.0) for tensor in (found, *held))
    if math.isfinite(squares) and not abs(got - squares) <= tolerance * scale:
        raise VerificationError(
            "the Gramian does not fit the model's own gradient: a bug in gramfx",
            expected=f"1ᵀ G 1 = {squares:.9g}",
            got=f"{got:.9g}",
            remedy="please report the model",
        )
