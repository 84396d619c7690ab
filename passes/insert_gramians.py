"""One symbolic ``gramfx::gramian`` node per parameter; their sum is the Gramian."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gramfx.emit import parameter_rows
from gramfx.errors import VerificationError
from gramfx.fallback import Maker, Part, inputs_behind, parameters_behind, reaching, rows_of_node, rows_through
from gramfx.forms import FormFactor, OneHot
from gramfx.graph import Builder, inline, named, output_node, rename, results, target_name, value
from gramfx.ops import GRAMIAN
from gramfx.passes.differentiate import Joint
from gramfx.terms import SAMPLE, SYMBOLIC, Factor, ParameterTerms, Term
from gramfx.torch_compat import is_symbolic, trace
from gramfx.uses import Rows, Runs, StaticBatchNeeded, Use, row_sizes, runs_of, term_of

aten = torch.ops.aten
PADDED = torch.ops.gramfx.jagged_to_padded.default

#: One term with the joint nodes its factors point at.
Found = tuple[Term, list[Node]]
RowsOf = Callable[[Sequence[Tensor], Part], Tensor]


def insert_gramians(
    joint: Joint,
    uses: Sequence[Use],
    rows: Rows,
    batch_size: int | torch.SymInt,
    *,
    exact: bool,
    saved: Sequence[str] = (),
) -> GraphModule:
    """Add ``gramian``, the second output, as a sum of one ``gramfx::gramian`` node per parameter.

    With ``exact`` all uses of a parameter meet, cross terms included; otherwise each use makes a block of its own.
    Uses that no einsum describes get their rows by a VJP, as nodes of the graph. saved: nodes of the joint graph to
    return as well, last.
    """
    graph_module = copy.deepcopy(joint.graph_module)
    work = _Insertion(graph_module, joint, rows, batch_size)
    for use in uses:
        work.add(use)
    objectives, *rest = results(graph_module)
    mutated = rest[: joint.mutated]
    total = work.total(objectives, exact)
    output_node(graph_module).args = ((objectives, total, *mutated, *(work.nodes[name] for name in saved)),)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


class _Insertion:
    def __init__(self, graph_module: GraphModule, joint: Joint, rows: Rows, batch_size: int | torch.SymInt) -> None:
        self.graph_module, self.joint, self.rows, self.batch_size = graph_module, joint, rows, batch_size
        self.nodes = named(graph_module)
        self.build = Builder(output_node(graph_module))
        self.found: dict[Node, list[Found]] = {}

    def add(self, use: Use) -> None:
        """The use's term, or the rows made for it, under each parameter concerned."""
        store = self.joint.full if use.coupled else self.joint.single
        cotangents = [self.nodes[store[tap.name]] for tap in use.taps if tap.name in store]
        if not cotangents:
            return
        if use.form is None:
            self._add_rows(use, *self._rows_of_node(use, store))
            return
        source, term, forward = term_of(use, self.rows, self.batch_size)
        tensors = [cotangents[0] if node is None else self._joint(node) for node in forward]
        if (runs := runs_of(use)) is not None:
            # What comes after the form's factors are ids into the parameter.
            pairs = itertools.zip_longest(tensors, use.form.factors)
            tensors = [self._padded(tensor, runs, use, factor) for tensor, factor in pairs]
        term, tensors = self._with_own_samples(term, tensors)
        if source is not None:
            if "parameter" in source.meta:
                self.found.setdefault(source, []).append((term, tensors))
            return
        shape, dtype = tuple(value(use.parameter_value).shape), value(use.parameter_value).dtype
        self._add_rows(use, lambda held, part: parameter_rows(term, shape, held, dtype, part), tensors)

    def _joint(self, node: Node) -> Node:
        return self.nodes[self.joint.forward[node.name]]

    def _padded(self, tensor: Node, runs: Runs, use: Use, factor: FormFactor | None) -> Node:
        """``[…, rows, …] -> […, samples, longest, …]`` where a factor has rows; padding by zeros adds nothing."""
        if factor is None or runs.label not in factor.dims:
            return tensor
        shape = list(value(tensor).shape)
        # Cotangents of several objectives a sample have one more dim, in front.
        lead = len(shape) - value(use.taps[0]).dim() if factor.node is None else 0
        at = lead + factor.dims.index(runs.label)
        cut = self.build(aten.reshape.default, tensor, [*shape[:at], runs.rows, runs.entries, *shape[at + 1 :]])
        rank = len(shape) + 1
        front = self.build(aten.permute.default, cut, [at, *range(at), *range(at + 1, rank)])
        padded = self.build(PADDED, front, self._joint(runs.offsets), runs.longest, 0.0)
        return self.build(aten.permute.default, padded, [*range(2, at + 2), 0, 1, *range(at + 2, rank + 1)])

    def _with_own_samples(self, term: Term, tensors: list[Node]) -> tuple[Term, list[Node]]:
        """A parameter with a dim along the batch: sample b's gradient is in row b alone."""
        if SAMPLE not in term.parameter:
            return term, tensors
        size = term.sizes[SAMPLE]
        if size == SYMBOLIC:
            raise StaticBatchNeeded(f"the parameter of {term.use} has a dim along the batch")
        axis = f"p{len(term.sizes)}"
        device = value(tensors[0]).device
        ids = self.build(aten.arange.default, size, device=device)
        own = Factor(len(tensors), (SAMPLE, axis), OneHot(size, -1))
        term = dataclasses.replace(
            term,
            factors=(*term.factors, own),
            parameter=tuple(axis if name == SAMPLE else name for name in term.parameter),
            sizes={**term.sizes, axis: size},
        )
        return term, [*tensors, ids]

    def _rows_of_node(self, use: Use, store: dict[str, str]) -> tuple[RowsOf, list[Node]]:
        tapped = [tap for tap in reaching(use) if tap.name in store]
        use = dataclasses.replace(use, taps=tuple(tapped))
        inputs = [self._joint(node) for node in use.op.all_input_nodes]
        cotangents = [self.nodes[store[tap.name]] for tap in tapped]
        return rows_of_node(use, self.rows, self.batch_size), [*inputs, *cotangents]

    def _add_rows(self, use: Use, rows: RowsOf, inputs: list[Node]) -> None:
        """Rows at the value used, pulled back to each parameter behind it; how to make some of them is kept."""
        made = self._call(lambda *held: rows(held, None), inputs)[0]
        rename(made, f"{use.clone.name}_rows")
        start = use.parameter_value
        pulled, through, behind = [made], None, []
        if start.op != "placeholder":
            through, behind = rows_through(start), [self._joint(node) for node in inputs_behind(start)]
            pulled = self._call(through, [made, *behind])
        names = tuple(node.name for node in (*inputs, *behind))
        for number, (parameter, node) in enumerate(zip(parameters_behind(start), pulled, strict=True)):
            node.meta["maker"] = Maker(rows, len(inputs), names, through, number)
            self.found.setdefault(parameter, []).append((self._dense(use, node), [node]))

    def _dense(self, use: Use, made: Node) -> Term:
        """The term whose rows are there already."""
        shape = [int(size) for size in value(made).shape[1:]]
        parameter = tuple(f"p{i}" for i in range(len(shape)))
        rows = row_sizes(self.rows, self.batch_size, use.coupled)
        through = use.form is not None
        why = f"through {target_name(use.parameter_value)}" if through else f"no einsum for {target_name(use.op)}"
        sizes = {**rows, **dict(zip(parameter, shape, strict=True))}
        return Term(use.clone.name, tuple(rows), (Factor(0, (*rows, *parameter)),), parameter, sizes, fallback=why)

    def _call(self, function: object, inputs: Sequence[Node]) -> list[Node]:
        with torch.no_grad():
            inner = trace(function, [value(node) for node in inputs])  # type: ignore[arg-type]
        graph = self.graph_module.graph
        with graph.inserting_before(output_node(self.graph_module)):
            return inline(graph, inner, list(inputs))

    def total(self, objectives: Node, exact: bool) -> Node:
        """The sum of a gramian node for each parameter, last uses first, as their cotangents come."""
        total: Node | None = None
        for parameter, found in reversed(self.found.items()):
            node = self._gramian(parameter, found, objectives, exact)
            total = node if total is None else self._plus(total, node)
        dtype = _result_dtype(list(self.found) or [objectives])
        if total is None:
            size = value(objectives).numel()
            if is_symbolic(size):
                raise StaticBatchNeeded("no use has a gradient")
            total = self.build(aten.zeros.default, [size, size], dtype=dtype, device=value(objectives).device)
        if value(total).dtype != dtype:
            total = self.build(aten._to_copy.default, total, dtype=dtype)
        rename(total, "gramian")
        return total

    def _plus(self, total: Node, node: Node) -> Node:
        added = self.build(aten.add.Tensor, total, node)
        added.meta["role"] = ("sum", "")
        return added

    def _gramian(self, parameter: Node, found: list[Found], objectives: Node, exact: bool) -> Node:
        tensors = list(dict.fromkeys(node for _, nodes in found for node in nodes))
        terms = tuple(_pointing(term, nodes, tensors) for term, nodes in found)
        name, shape = parameter.meta["parameter"], tuple(int(size) for size in value(parameter).shape)
        held = ParameterTerms(name, shape, terms, cross=exact)
        dtype = _accumulated(value(parameter).dtype)
        node = self.build(GRAMIAN, tensors, objectives, held.to_json(), dtype)
        rename(node, f"{parameter.name}_gramian")
        node.meta["role"] = ("gramian", name)
        return node


def _pointing(term: Term, nodes: list[Node], tensors: list[Node]) -> Term:
    factors = tuple(dataclasses.replace(f, tensor=tensors.index(nodes[f.tensor])) for f in term.factors)
    return dataclasses.replace(term, factors=factors)


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _result_dtype(nodes: Sequence[Node]) -> torch.dtype:
    """The dtype of the Gramian: the parameters' own, the widest where they differ."""
    dtype = value(nodes[0]).dtype
    for node in nodes[1:]:
        dtype = torch.promote_types(dtype, value(node).dtype)
    return dtype


def verify_gramian(graph_module: GraphModule) -> None:
    """Raise :class:`VerificationError` unless the second output is ``[m, m]``."""
    objectives, gramian = (value(node) for node in results(graph_module)[:2])
    if gramian.dim() != 2 or gramian.shape[0] != objectives.numel() or gramian.shape[1] != objectives.numel():
        raise VerificationError("the Gramian has a wrong shape", got=str(tuple(gramian.shape)))
