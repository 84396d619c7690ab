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
    """What a check found. ``samples`` of ``objectives`` were looked at; ``coupled_by``: where samples meet."""

    rows: tuple[Row, ...]
    gradient: float
    samples: int
    objectives: int
    coupled_by: str
    tolerance: float

    @property
    def exact(self) -> bool:
        """Whether nothing is off; what is not a number is."""
        return all(error <= self.tolerance for error in (self.gradient, *(row.error for row in self.rows)))

    def __str__(self) -> str:
        head = ("parameter", "use", "strategy", "error", "")
        cells = [(r.parameter, r.use or "-", r.strategy, f"{r.error:.1e}", self._verdict(r.error)) for r in self.rows]
        cells.append(("gradient", "-", "-", f"{self.gradient:.1e}", self._verdict(self.gradient)))
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
    """One model, its objectives by autograd, and those of them that are looked at."""

    def __init__(self, step: Step, given: Inputs, dtype: torch.dtype, samples: int | None) -> None:
        self.step, self.given, self.tolerance = step, given, TOLERANCE.get(dtype, 5e-2)
        self.lowering = step.lowering
        self.arguments = step.arguments(*given.args, targets=given.targets, **given.kwargs)
        self.planned = self.lowering.stages["planned"]
        self.parameters = {terms_of(node).parameter: node for node in gramian_nodes(self.planned)}
        inputs = {node.meta.get("parameter"): i for i, node in enumerate(placeholders(self.planned))}
        self.tensors = {name: self.arguments[inputs[name]] for name in self.parameters}
        self.objectives = self._plain()
        count = self.objectives.numel()
        wanted = count if samples is None else min(samples, count)
        self.chosen = [count * i // wanted for i in range(wanted)] if wanted else []

    def _plain(self) -> Tensor:
        """The objectives, as autograd knows them."""
        torch.manual_seed(SEED)
        output = self.step.model(*self.given.args, **self.given.kwargs)
        made: Tensor = (
            output if self.step.objective is None else self.step.objective(output, *(self.given.targets or ()))
        )
        return made

    def report(self) -> Report:
        """Everything about the model."""
        rows = _rows(self.objectives, list(self.tensors.values()), self.chosen)
        wanted = dict(zip(self.tensors, rows, strict=True))
        found = self._summands()
        checked = [self._row(name, found[name], wanted[name]) for name in self.parameters]
        for row in [row for row in checked if not row.error <= self.tolerance]:
            checked += self._uses(row.parameter)
        coupling = self.lowering.coupling
        first = coupling.first if coupling is not None and any(use.coupled for use in self.lowering.uses) else None
        count = self.objectives.numel()
        return Report(tuple(checked), self._gradient(wanted), len(self.chosen), count, str(first or ""), self.tolerance)

    def _summands(self) -> Mapping[str, Tensor]:
        """Each parameter's part of the Gramian, by the program as it is lowered."""
        lowered = self.lowering.stages["lowered"]
        # The last call that was made for a parameter gives its part.
        names = {subject: node.name for node in lowered.graph.nodes for subject in _contracted(node)}
        run = _Values(lowered, list(names.values()))
        torch.manual_seed(SEED)
        with torch.no_grad():
            run.run(*self.arguments)
        return {parameter: run.values[name] for parameter, name in names.items()}

    def _row(self, parameter: str, found: Tensor, jacobian: Tensor) -> Row:
        got, want = found[self.chosen][:, self.chosen], jacobian @ jacobian.T
        planned = self.step.plan.of(parameter)
        return Row(parameter, "", "" if planned is None else planned.label, _error(got, want))

    def _gradient(self, wanted: Mapping[str, Tensor]) -> float:
        """The error of ``Jᵀ w``, for weights on the objectives that are looked at."""
        torch.manual_seed(SEED)
        objectives, _ = self.step(*self.given.args, targets=self.given.targets, **self.given.kwargs)
        weights = torch.zeros_like(objectives).flatten()
        weights[self.chosen] = torch.linspace(-1.0, 2.0, len(self.chosen)).to(weights)
        leaves = [tensor for tensor in self.tensors.values() if tensor.is_leaf]
        if not leaves or not objectives.requires_grad:
            return 0.0
        got = torch.autograd.grad(objectives, leaves, weights.reshape(objectives.shape), allow_unused=True)
        want = [weights[self.chosen].to(rows) @ rows for rows in wanted.values()]
        pairs = [(torch.zeros_like(w) if g is None else g.reshape(-1), w) for g, w in zip(got, want, strict=True)]
        return _error(torch.cat([g.double() for g, _ in pairs]), torch.cat([w.double() for _, w in pairs]))

    def _uses(self, parameter: str) -> list[Row]:
        """Each use by itself: its rows of the Jacobian against autograd's by the use's own clone."""
        node = self.parameters[parameter]
        terms, factors = terms_of(node), factors_of(node)
        run = _Values(self.planned, [factor.name for factor in factors])
        torch.manual_seed(SEED)
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
        torch.manual_seed(SEED)
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
    """``[len(chosen), entries]`` for each leaf, a backward pass an objective."""
    flat = objectives.reshape(-1)
    rows: list[list[Tensor]] = [[] for _ in leaves]
    for index in chosen:
        found = torch.autograd.grad(flat[index], leaves, retain_graph=True, allow_unused=True)
        for row, gradient, leaf in zip(rows, found, leaves, strict=True):
            row.append((torch.zeros_like(leaf) if gradient is None else gradient).reshape(-1).detach())
    return [
        torch.stack(row) if row else leaf.new_zeros(0, leaf.numel()) for row, leaf in zip(rows, leaves, strict=True)
    ]


def _error(got: Tensor, want: Tensor) -> float:
    """``max |got - want| / max |want|``; the distance itself where ``want`` is zero."""
    if not want.numel():
        return 0.0
    distance, scale = float((got.double() - want.double()).abs().max()), float(want.double().abs().max())
    return distance / scale if scale > 0 else distance
