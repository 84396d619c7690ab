"""The uses of a separated graph: what each needs from the backward pass, and the term it gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from gramfx.axes import Loc, Value, ragged
from gramfx.forms import Form, FormFactor, OneHot, Windows
from gramfx.graph import ancestors, named, output_node, value
from gramfx.provenance import differentiable
from gramfx.rules.pullbacks import Spelling, pull_back
from gramfx.rules.uses import form_of
from gramfx.terms import SAMPLE, SYMBOLIC, Factor, Term
from gramfx.torch_compat import is_symbolic


class StaticBatchNeeded(Exception):
    """A symbolic batch cannot be kept; the message says why."""


@dataclass(frozen=True)
class Rows:
    """How objectives are rows: ``m = before * batch * after`` in row-major order.

    Where no batch is known, ``before`` counts them all and ``batched`` is false.
    """

    before: int
    after: int
    batched: bool


@dataclass(frozen=True)
class Use:
    """One use. ``taps``: the nodes whose cotangents it needs; ``coupled``: whether one per objective of all samples.

    ``form`` is ``None`` where only the one-node fallback is exact.
    """

    clone: Node
    op: Node
    operand: Node
    taps: tuple[Node, ...]
    coupled: bool
    form: Form | None

    @property
    def parameter_value(self) -> Node:
        """The parameter, or the function of parameters, that is used."""
        return self.clone.all_input_nodes[0]

    @property
    def needed(self) -> tuple[Node, ...]:
        """The forward values that its gradient is made from, besides cotangents."""
        ids = [node for node in ancestors(self.parameter_value) if not differentiable(value(node))]
        if self.form is None:
            return (*ids, *self.op.all_input_nodes)
        return (*ids, *(factor.node for factor in self.form.factors if factor.node is not None))


def uses_of(graph_module: GraphModule, coupled: Collection[Node], rows: Rows) -> list[Use]:
    """All uses in program order. The graph is separated and its axes are traced."""
    nodes = named(graph_module)
    output = output_node(graph_module)
    return [
        _use(node, nodes[node.meta["use"]["op"]], nodes[node.meta["use"]["operand"]], output, coupled, rows)
        for node in graph_module.graph.nodes
        if "use" in node.meta
    ]


def _use(clone: Node, op: Node, operand: Node, output: Node, coupled: Collection[Node], rows: Rows) -> Use:
    if op is output:
        dims = tuple((f"d{i}",) for i in range(value(clone).dim()))
        return Use(clone, op, operand, (clone,), True, Form("operand", (FormFactor(None, dims),), dims, dims))
    outs = _outputs(op)
    known = [out.meta["axes"] for out in outs]
    together = not rows.batched or any(
        out in coupled or axes.batch is None for out, axes in zip(outs, known, strict=True)
    )
    form = form_of(op, operand, clone)
    if not together and (form is None or not _fits(form, first_value(op))):
        # The fallback takes samples apart by a dim, and rows of a ragged batch have none for them.
        together = any(ragged(axes.batch) for axes in known)
        form = form if together else None
    return Use(clone, op, operand, _taps(form, operand, outs), together or op in coupled, form)


def _taps(form: Form | None, operand: Node, outs: list[Node]) -> tuple[Node, ...]:
    if form is None or form.tap == "output":
        return tuple(outs)
    return (operand if form.tap == "operand" else form.tap,)


def first_value(op: Node) -> Value:
    """What is known of an op's output, the first of several."""
    axes = op.meta["axes"]
    return axes[0] if isinstance(axes, tuple) else axes


def _outputs(op: Node) -> list[Node]:
    """The differentiable outputs of an op that somebody reads."""
    found = list(op.users) if isinstance(value(op), (tuple, list)) else [op]
    return [node for node in found if differentiable(value(node))]


def _fits(form: Form, out: Value) -> bool:
    """Whether the batch sits in one plain label of the form, in the same place in every factor that has it."""
    assert out.batch is not None
    label = form.output[out.batch.dim]
    if len(label) != 1 or not (isinstance(out.batch.inner, int) or _fits_runs(form, label, out)):
        return False
    if not any(label in factor.dims for factor in form.factors):
        return False
    return all(_agrees(factor, label, out.batch) for factor in form.factors if factor.node is not None)


def _fits_runs(form: Form, label: tuple[str, ...], out: Value) -> bool:
    """Whether the label is all rows of a ragged batch, and nothing but them, and no extent of the parameter."""
    runs = ragged(out.batch)
    if runs is None or out.batch is None or isinstance(form.tap, Node) or label in form.parameter:
        return False
    entries = runs.within(out.batch.inner)
    return entries is not None and out.shape[out.batch.dim] == runs.rows * entries


@dataclass(frozen=True)
class Runs:
    """The label of a form that counts the rows of a ragged batch, ``entries`` in succession for each row.

    ``offsets``: the node that says where the runs of samples begin; ``longest``: of these, how many rows.
    """

    label: tuple[str, ...]
    rows: int
    entries: int
    offsets: Node
    longest: int


def runs_of(use: Use) -> Runs | None:
    """The runs of rows by which a use that is not coupled keeps samples apart, None where it has a dim for them."""
    out = first_value(use.op)
    runs = None if use.coupled or use.form is None else ragged(out.batch)
    if runs is None or use.form is None or out.batch is None:
        return None
    offsets = next(node for node in use.op.graph.find_nodes(op="placeholder") if node.name == runs.offsets)
    entries = runs.within(out.batch.inner)
    assert entries is not None
    return Runs(use.form.output[out.batch.dim], runs.rows, entries, offsets, int(offsets.meta["longest"]))


def _agrees(factor: FormFactor, label: tuple[str, ...], batch: Loc) -> bool:
    assert factor.node is not None
    own = factor.node.meta["axes"].batch
    return own is None or (factor.dims[own.dim] == label and own.inner == batch.inner)


# ---------------------------------------------------------------- terms


def term_of(use: Use, rows: Rows, batch_size: int | torch.SymInt) -> tuple[Node | None, Term, tuple[Node | None, ...]]:
    """The parameter, the term, and the node behind each factor (``None``: the cotangent).

    The parameter is ``None`` where the value used is more than a view of one: the term is then the value's.
    """
    assert use.form is not None
    spelled = _Axes(use, rows, batch_size)
    factors = [spelled.factor(index, factor) for index, factor in enumerate(use.form.factors)]
    spelling = Spelling([spelled.dim(labels) for labels in use.form.parameter], spelled.sizes)
    source = _pulled(use.parameter_value, spelling)
    parameter = tuple(axis for dim in spelling.dims for axis in dim)
    nodes = [factor.node for factor in use.form.factors]
    for ids, axes, view in spelling.choices:
        factors.append(Factor(len(factors), axes, view))
        nodes.append(ids)
    factors = [dataclasses.replace(f, axes=_taken_apart(f.axes, spelling.splits)) for f in factors]
    term = Term(use.clone.name, spelled.rows, tuple(factors), parameter, dict(spelling.sizes), dict(spelling.slices))
    return source, term, tuple(nodes)


def _pulled(node: Node, spelling: Spelling) -> Node | None:
    """Pull back to the parameter; where that fails the spelling stays at ``node``."""
    kept = ([list(dim) for dim in spelling.dims], dict(spelling.sizes))
    source = pull_back(node, spelling)
    if source is None:
        spelling.dims, spelling.sizes = kept
        spelling.slices, spelling.splits, spelling.choices = {}, {}, []
    return source


def _taken_apart(axes: tuple[str, ...], splits: dict[str, list[str]]) -> tuple[str, ...]:
    found: list[str] = []
    for axis in axes:
        found.extend(_taken_apart(tuple(splits[axis]), splits) if axis in splits else (axis,))
    return tuple(found)


def row_sizes(rows: Rows, batch_size: int | torch.SymInt, coupled: bool) -> dict[str, int]:
    """The axes of a use's rows and their extents, those of one entry left out but for the sample's."""
    if coupled:
        sizes = {"k0": rows.before * rows.after * (int(batch_size) if rows.batched else 1)}
    else:
        batch = SYMBOLIC if is_symbolic(batch_size) else int(batch_size)
        sizes = {"k0": rows.before, SAMPLE: batch, "k1": rows.after}
    return {axis: size for axis, size in sizes.items() if size != 1 or axis == SAMPLE}


class _Axes:
    """Turns the labels of a form into axes of a term."""

    def __init__(self, use: Use, rows: Rows, batch_size: int | torch.SymInt) -> None:
        assert use.form is not None
        self.use, self.form, self.runs = use, use.form, runs_of(use)
        self.sizes: dict[str, int] = {}
        self.names: dict[str, tuple[str, ...]] = {}
        self.rows = self._row_axes(rows, batch_size)
        batch = None if use.coupled else self._batch()
        parameter = {label for labels in use.form.parameter for label in labels}
        for factor in use.form.factors:
            for labels, size in zip(factor.dims, self._shape(factor), strict=True):
                for label, extent in self._extents(labels, size):
                    if label not in self.names:
                        self._name(label, extent, "p" if label in parameter else "t", batch, batch_size)

    def _row_axes(self, rows: Rows, batch_size: int | torch.SymInt) -> tuple[str, ...]:
        found = row_sizes(rows, batch_size, self.use.coupled)
        self.sizes |= found
        return tuple(found)

    def _batch(self) -> tuple[str, Loc]:
        loc = first_value(self.use.op).batch
        assert loc is not None
        return self.form.output[loc.dim][0], loc

    def _shape(self, factor: FormFactor) -> tuple[int | torch.SymInt, ...]:
        node = factor.node if factor.node is not None else self.use.taps[0]
        shape = tuple(value(node).shape)
        if isinstance(factor.view, Windows):
            return (*shape[: -len(factor.view.kernel)], *factor.view.out, *factor.view.kernel)
        return (*shape, factor.view.classes) if isinstance(factor.view, OneHot) else shape

    def _extents(self, labels: tuple[str, ...], size: int | torch.SymInt) -> list[tuple[str, int | torch.SymInt]]:
        known = dict(self.form.sizes)
        return [(labels[0], size)] if len(labels) == 1 else [(label, known[label]) for label in labels]

    def _name(
        self, label: str, size: int | torch.SymInt, kind: str, batch: tuple[str, Loc] | None, total: int | torch.SymInt
    ) -> None:
        if batch is None or label != batch[0]:
            self.names[label] = (self._axis(kind, size),)
            return
        if self.runs is not None:
            # Runs are padded to the longest before they meet.
            self.names[label] = (SAMPLE, *(self._axis(kind, n) for n in (self.runs.longest, self.runs.entries)))
            return
        inner = int(batch[1].inner)
        outer = int(size // (total * inner))
        made = [self._axis(kind, outer)] if outer > 1 else []
        made.append(SAMPLE)
        made += [self._axis(kind, inner)] if inner > 1 else []
        self.names[label] = tuple(made)

    def _axis(self, kind: str, size: int | torch.SymInt) -> str:
        if is_symbolic(size):
            raise StaticBatchNeeded(f"an extent of {self.use.op} depends on the batch size")
        name = f"{kind}{len(self.sizes)}"
        self.sizes[name] = int(size)
        return name

    def dim(self, labels: tuple[str, ...]) -> list[str]:
        """The axes of one dim."""
        return [axis for label in labels for axis in self.names[label]]

    def factor(self, index: int, factor: FormFactor) -> Factor:
        """The factor with axes; a cotangent has those of the objectives first."""
        axes = [axis for labels in factor.dims for axis in self.dim(labels)]
        lead = [axis for axis in self.rows if axis != SAMPLE] if factor.node is None else []
        return Factor(index, (*lead, *axes), factor.view)
