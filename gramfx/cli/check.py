"""``gramfx check``: a model's Gramian and gradient against autograd, parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from gramfx.api import Step
from gramfx.cli.common import capture, progress, step_for
from gramfx.cli.spec import Inputs
from gramfx.emit import parameter_rows
from gramfx.gramians import accumulated_in, factors_of, gramian_nodes, terms_of
from gramfx.graph import named, placeholders
from gramfx.ops import GRAMIAN
from gramfx.plan import table
from gramfx.program import user_name

#: The largest error that still counts as exact, as a share of the largest entry.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
SEED = 0


@dataclass(frozen=True)
class Row:
    """One parameter, or one use of it: how it was contracted, and how far off it is."""

    parameter: str
    use: str
    strategy: str
    error: float


@dataclass(frozen=True)
class Report:
    """What a check found: errors by parameter, of the whole Gramian, and of a combined gradient.

    ``samples`` of ``objectives`` were looked at; ``coupled_by``: where samples meet.
    """

    rows: tuple[Row, ...]
    gramian: float
    gradient: float
    samples: int
    objectives: int
    coupled_by: str
    tolerance: float

    @property
    def exact(self) -> bool:
        """Whether nothing is off; what is not a number is."""
        return all(
            error <= self.tolerance for error in (self.gramian, self.gradient, *(row.error for row in self.rows))
        )

    def __str__(self) -> str:
        head = ("parameter", "use", "strategy", "error", "")
        cells = [(r.parameter, r.use or "-", r.strategy, f"{r.error:.1e}", self._verdict(r.error)) for r in self.rows]
        for name, error in (("the Gramian", self.gramian), ("the gradient", self.gradient)):
            cells.append((name, "-", "-", f"{error:.1e}", self._verdict(error)))
        lines = table([head, *cells])
        lines.append(f"{self.samples} of {self.objectives} objectives against autograd, tolerance {self.tolerance:.0e}")
        return "\n".join([*lines, f"coupled by {self.coupled_by}"] if self.coupled_by else lines)

    def _verdict(self, error: float) -> str:
        return "" if error <= self.tolerance else "OFF"


def check(
    target: str, objective: str | None, given: Inputs, dtype: torch.dtype, samples: int | None, quiet: bool
) -> Report:
    """Compare ``samples`` of the objectives, all of them by default, with backward passes of autograd."""
    with progress(f"making {target}", quiet):
        given = _in(given, dtype)
        step = step_for(target, objective, given)
        if isinstance(step.model, nn.Module):
            step.model.to(dtype)
    with progress(f"capturing {target}", quiet):
        capture(step, given)
    with progress("running autograd", quiet):
        return _Check(step, given, dtype, samples).report()


def _in(given: Inputs, dtype: torch.dtype) -> Inputs:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    kwargs = {name: cast(tensor) for name, tensor in given.kwargs.items()}
    targets = given.targets and tuple(map(cast, given.targets))
    return Inputs(tuple(map(cast, given.args)), kwargs, targets, given.in_dims, given.symbolic)


class _Values(Interpreter):
    """Keeps the values of some nodes; Gramian nodes, which need their plan, are left out."""

    def __init__(self, graph_module: GraphModule, kept: Sequence[str]) -> None:
        super().__init__(graph_module)
        self.kept, self.values = set(kept), dict[str, Tensor]()

    def run_node(self, n: Node) -> Any:
        made = super().run_node(n)
        if n.name in self.kept:
            self.values[n.name] = made
        return made

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is GRAMIAN:
            size = args[1].numel()
            return args[1].new_zeros(size, size)
        return super().call_function(target, args, kwargs)


class _Check:
    """One model by autograd, all of its trainable parameters, and those of its objectives that are looked at."""

    def __init__(self, step: Step, given: Inputs, dtype: torch.dtype, samples: int | None) -> None:
        self.step, self.given, self.dtype = step, given, dtype
        self.tolerance = TOLERANCE[dtype]
        self.lowering = step.lowering
        self.arguments = step.arguments(*given.args, targets=given.targets, **given.kwargs)
        self.state = [(buffer, buffer.clone()) for buffer in step.buffers()]
        self.planned = self.lowering.stages["planned"]
        self.nodes = {terms_of(node).parameter: node for node in gramian_nodes(self.planned)}
        self.parameters = self._trainable()
        objectives = self._plain()
        self.count = objectives.numel()
        wanted = self.count if samples is None else min(samples, self.count)
        self.chosen = [self.count * i // wanted for i in range(wanted)]
        rows = _rows(objectives, list(self.parameters.values()), self.chosen)
        self.jacobian = dict(zip(self.parameters, rows, strict=True))

    def _trainable(self) -> dict[str, Tensor]:
        """Those that the program takes, and all that the model has: what was left out has to be found out."""
        inputs = zip(placeholders(self.planned), self.arguments, strict=True)
        found = {str(node.meta["parameter"]): held for node, held in inputs if "parameter" in node.meta}
        known = {id(held) for held in found.values()}
        owned = ((user_name(name), held) for name, held in self.step.named_parameters() if held.requires_grad)
        return {**found, **{name: held for name, held in owned if id(held) not in known}}

    def _start(self) -> None:
        """Every run begins with the same buffers and draws the same numbers."""
        with torch.no_grad():
            for buffer, before in self.state:
                buffer.copy_(before)
        torch.manual_seed(SEED)

    def _plain(self) -> Tensor:
        """The objectives, as autograd knows them."""
        self._start()
        output = self.step.model(*self.given.args, **self.given.kwargs)
        made: Tensor = (
            output if self.step.objective is None else self.step.objective(output, *(self.given.targets or ()))
        )
        return made

    def report(self) -> Report:
        """Everything about the model."""
        summands = self._summands()
        gramian, gradient = self._whole()
        wanted = sum((rows @ rows.T for rows in self.jacobian.values()), torch.zeros(()))
        whole = _error(gramian[self.chosen][:, self.chosen], wanted)
        # What is no more than rounding beside the whole is no error: the bias before a batch norm has no gradient.
        floor = torch.finfo(self.dtype).eps * float(wanted.abs().max()) / self.tolerance if self.chosen else 0.0
        checked = [self._row(name, summands.get(name), floor) for name in self.parameters]
        for row in [row for row in checked if not row.error <= self.tolerance]:
            checked += self._uses(row.parameter) if row.parameter in self.nodes else []
        coupling = self.lowering.coupling
        first = coupling.first if coupling is not None and any(use.coupled for use in self.lowering.uses) else None
        sizes = len(self.chosen), self.count
        return Report(tuple(checked), whole, gradient, *sizes, str(first or ""), self.tolerance)

    def _summands(self) -> Mapping[str, Tensor]:
        """Each parameter's part of the Gramian, by the program as it is lowered."""
        lowered = self.lowering.stages["lowered"]
        # The last call that was made for a parameter gives its part.
        names = {subject: node.name for node in lowered.graph.nodes for subject in _contracted(node)}
        run = _Values(lowered, list(names.values()))
        self._start()
        with torch.no_grad():
            run.run(*self.arguments)
        return {parameter: run.values[name] for parameter, name in names.items()}

    def _row(self, parameter: str, found: Tensor | None, floor: float) -> Row:
        want = self.jacobian[parameter] @ self.jacobian[parameter].T
        got = torch.zeros_like(want) if found is None else found[self.chosen][:, self.chosen]
        planned = self.step.plan.of(parameter)
        return Row(parameter, "", "not used" if planned is None else planned.label, _error(got, want, floor))

    def _whole(self) -> tuple[Tensor, float]:
        """The Gramian that a step returns, and the error of its ``Jᵀ w``, for weights on the chosen objectives."""
        self._start()
        objectives, gramian = self.step(*self.given.args, targets=self.given.targets, **self.given.kwargs)
        weights = torch.zeros_like(objectives).flatten()
        weights[self.chosen] = torch.linspace(-1.0, 2.0, len(self.chosen)).to(weights)
        learned = list(self.parameters.values())
        found = torch.autograd.grad(objectives, learned, weights.reshape(objectives.shape), allow_unused=True)
        got = [torch.zeros_like(held) if g is None else g for g, held in zip(found, learned, strict=True)]
        want = [weights[self.chosen].to(rows) @ rows for rows in self.jacobian.values()]
        return gramian, _error(torch.cat([one.flatten().double() for one in got]), torch.cat(want))

    def _uses(self, parameter: str) -> list[Row]:
        """Each use by itself: its rows of the Jacobian against autograd's by the use's own clone."""
        node = self.nodes[parameter]
        terms, factors = terms_of(node), factors_of(node)
        run = _Values(self.planned, [factor.name for factor in factors])
        self._start()
        with torch.no_grad():
            run.run(*self.arguments)
        tensors = [run.values[factor.name] for factor in factors]
        want = self._rows_by_use([term.use for term in terms.terms])
        found = []
        for term in terms.terms:
            got = parameter_rows(term, terms.shape, tensors, accumulated_in(node))[self.chosen].flatten(1)
            if term.use in want and want[term.use].shape == got.shape:
                found.append(Row(parameter, term.use, "rows", _error(got, want[term.use])))
        return found

    def _rows_by_use(self, uses: Sequence[str]) -> dict[str, Tensor]:
        separated = self.lowering.stages["separated"]
        clones = [use for use in uses if use in named(separated)]
        run = _Leaves(separated, clones)
        self._start()
        made = run.run(*(tensor.detach() for tensor in self.arguments))
        rows = _rows(made[0], [run.values[clone] for clone in clones], self.chosen)
        return dict(zip(clones, rows, strict=True))


def _contracted(node: Node) -> list[str]:
    role, subject = node.meta.get("role", ("", ""))
    return [subject] if role == "contraction" else []


class _Leaves(_Values):
    """Lets autograd differentiate by the values of the nodes that are kept."""

    def run_node(self, n: Node) -> Any:
        made = super().run_node(n)
        if n.name in self.kept:
            made = self.values[n.name] = made.detach().requires_grad_()
        return made


def _rows(objectives: Tensor, leaves: Sequence[Tensor], chosen: Sequence[int]) -> list[Tensor]:
    """``[len(chosen), entries]`` for each leaf in float64, a backward pass an objective."""
    flat = objectives.reshape(-1)
    rows: list[list[Tensor]] = [[] for _ in leaves]
    for index in chosen:
        found = torch.autograd.grad(flat[index], leaves, retain_graph=True, allow_unused=True)
        for row, gradient, leaf in zip(rows, found, leaves, strict=True):
            dense = torch.zeros_like(leaf) if gradient is None else gradient.to_dense()
            row.append(dense.reshape(-1).detach().double())
    return [
        torch.stack(row) if row else torch.zeros(0, leaf.numel()).double()
        for row, leaf in zip(rows, leaves, strict=True)
    ]


def _error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """``max |got - want| / max |want|``, by ``floor`` where that is larger; the distance itself where both are zero."""
    if not want.numel():
        return 0.0
    distance, scale = float((got.double() - want.double()).abs().max()), float(want.double().abs().max())
    return distance / max(scale, floor) if max(scale, floor) > 0 else distance
