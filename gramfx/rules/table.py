"""What an axis rule sees and answers, the table of rules, and the one engine most rules go through.

A rule is called once per tensor output. It names the dims of the operands and of the output by labels and lets
``Call.labelled`` follow the batch: a label missing from the output is reduced, a mixed label mixes its entries, and
operands that bring the batch to different places pair different samples. What mixes samples is flagged on the edge
(output, operand), and the analysis goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from gramfx.axes import Loc, Shape, Size, Value, holds

Label = int | str | None  # None is a new dim of an output: no operand's label equals it
Labels = Sequence[Label]


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor argument of a call: its node and what is known of its value."""

    node: Node
    value: Value

    @property
    def rank(self) -> int:
        """The number of dims."""
        return len(self.value.shape)

    @property
    def batch(self) -> Loc | None:
        """Where the samples are."""
        return self.value.batch

    @property
    def shape(self) -> Shape:
        """Its sizes."""
        return self.value.shape


@dataclass
class Call:
    """One output of one op call.

    ``args``: by the schema's names, tensors as Operand, symbolic sizes as Size. ``shapes``: of every output, this one's
    at ``index``. ``flags``: why an operand's samples mix in this output.
    """

    op: torch._ops.OpOverload
    args: dict[str, Any]
    shapes: tuple[Shape, ...]
    index: int
    floating: bool
    batch: Size
    flags: dict[Node, str] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    @property
    def shape(self) -> Shape:
        """Of this output."""
        return self.shapes[self.index]

    @property
    def operands(self) -> list[Operand]:
        """Every tensor argument, lists flattened, in schema order."""
        return [operand for argument in self.args.values() for operand in tensors_in(argument)]

    @property
    def first(self) -> Operand:
        """The first tensor argument."""
        return self.operands[0]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by its schema name; ``default`` where the overload has no such argument."""
        return self.args.get(name, default)

    def dims(self, name: str = "dim", rank: int | None = None) -> set[int]:
        """The dims an argument names, counted from the left; all of them where it names none."""
        rank = self.first.rank if rank is None else rank
        named = self.args.get(name)
        if named is None or named == []:
            return set(range(rank))
        return {dim % max(rank, 1) for dim in (named if isinstance(named, (list, tuple)) else [named])}

    def flag(self, operand: Operand, reason: str) -> None:
        """Note that this operand's samples mix here, if derivatives can tell."""
        if self.floating and operand.value.differentiable and operand.batch is not None:
            self.flags.setdefault(operand.node, reason)

    def result(self, batch: Loc | None, iota: Loc | None = None) -> Value:
        """The output's value; differentiable if its type and some operand are."""
        depends = self.floating and any(operand.value.differentiable for operand in self.operands)
        return Value(self.shape, depends, batch, iota)

    def constant(self, batch: Loc | None = None, iota: Loc | None = None) -> Value:
        """A value no derivative flows through."""
        self.seen.update(id(operand) for operand in self.operands)
        return Value(self.shape, False, batch, iota)

    def placed(self, operand: Operand, place: Loc | None, reason: str) -> Loc | None:
        """``place`` if the output can hold the batch there, else None and the operand flagged."""
        self.seen.add(id(operand))
        if place is not None and holds(self.shape[place.dim], place.inner, self.batch):
            return place
        self.flag(operand, reason)
        return None

    def joined(self, places: Sequence[tuple[Operand, Loc | None]]) -> Value:
        """The output's value from where each operand brings the batch; differentiable operands are heard first.

        Where no derivative flows the label of a row is free: only disagreement between derivatives couples.
        """
        chosen: Loc | None = None
        for operand, place in sorted(places, key=lambda pair: not pair[0].value.differentiable):
            self.seen.add(id(operand))
            if chosen is None:
                chosen = place
            elif place is not None and place != chosen:
                self.flag(operand, "pairs different samples")
        return self.result(chosen)

    def labelled(
        self, inputs: Sequence[tuple[Operand, Labels | None]], output: Labels, mixed: Collection[Label] = ()
    ) -> Value:
        """Follow the batch through labels; an operand whose labels are None does not reach this output."""
        reaching = [(operand, names) for operand, names in inputs if names is not None]
        joined = self.joined([(operand, self._follow(operand, names, output, mixed)) for operand, names in reaching])
        self.seen.update(id(operand) for operand, _ in inputs)
        depends = self.floating and any(operand.value.differentiable for operand, _ in reaching)
        return Value(joined.shape, depends, joined.batch)

    def _follow(self, operand: Operand, names: Labels, output: Labels, mixed: Collection[Label]) -> Loc | None:
        if operand.batch is None:
            return None
        name = names[operand.batch.dim]
        output = list(output)[: len(self.shape)]
        if name is None or name not in output:
            self.flag(operand, "reduces over the batch")
            return None
        dim = output.index(name)
        if self.shape[dim] != operand.shape[operand.batch.dim]:
            self.flag(operand, "changes the extent of the batch")
            return None
        if name in mixed:
            self.flag(operand, "mixes along the batch")
        return Loc(dim, operand.batch.inner)


Rule = Callable[[Call], Value]
AXIS_RULES: dict[str, Rule] = {}


def define(names: str, rule: Rule) -> None:
    """Give every op in a space-separated list this rule; ``max.other`` names one overload, ``max`` all the others."""
    for name in names.split():
        AXIS_RULES[f"aten.{name}"] = rule


def tensors_in(argument: Any) -> Iterator[Operand]:
    """The operands in an argument, lists flattened."""
    if isinstance(argument, Operand):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from tensors_in(item)


def right_aligned(rank: int, width: int) -> Labels:
    """Labels of a tensor broadcast to ``width`` dims: counted from the right, as broadcasting does."""
    return tuple(range(width - rank, width))


def broadcast(call: Call) -> Value:
    """``out[i] = f(a[i], b[i], …)`` with broadcasting; every operand's dims align to the right."""
    width = len(call.shape)
    return call.labelled([(o, right_aligned(o.rank, width)) for o in call.operands], tuple(range(width)))


def opaque(call: Call) -> Value:
    """Any entry of the output may depend on any entry of any operand."""
    for operand in call.operands:
        call.flag(operand, "has no rule that keeps the samples apart")
        call.seen.add(id(operand))
    return call.result(None)


def equation(text: str) -> Rule:
    """A rule from an einsum string over the schema's tensor arguments, outputs split by ``;``.

    ``...`` aligns to the right. An operand with fewer dims than letters has the last of them, as a bias does.
    """
    terms, outputs = text.replace(" ", "").split("->")
    inputs, results = terms.split(","), outputs.split(";")

    def rule(call: Call) -> Value:
        if call.index >= len(results):
            return opaque(call)
        arguments = [call.args[slot] for slot in _tensor_slots(call.op)]
        listed = [(o, spell(term, o.rank)) for o, term in zip(arguments, inputs, strict=False) if o is not None]
        return call.labelled(listed, spell(results[call.index], len(call.shape)))

    return rule


def spell(term: str, rank: int) -> Labels:
    """The labels of one term; the dims under ``...`` are named by negative numbers from the right."""
    if "..." not in term:
        return tuple(term[len(term) - rank :])
    before, after = term.split("...")
    hidden = max(rank - len(before) - len(after), 0)
    names: list[Label] = [*before, *range(-hidden, 0), *after]
    return tuple(names[len(names) - rank :])


def _tensor_slots(op: torch._ops.OpOverload) -> list[str]:
    return [a.name for a in op._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]
