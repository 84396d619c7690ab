"""The plan: how each parameter's terms are contracted, and what that costs. A value; it holds no tensors."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gramfx.errors import InputError
from gramfx.terms import Recipe

_UNITS = {"": 1, "B": 1} | {f"{p}iB": 2 ** (10 * i) for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)} | {"kB": 1000}


@dataclass(frozen=True)
class Regime:
    """The batch sizes from ``first`` to ``last``, both included; no end where ``last`` is ``None``."""

    first: int
    last: int | None

    def __contains__(self, batch: int) -> bool:
        return self.first <= batch and (self.last is None or batch <= self.last)

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.first} and more"
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"

    def within(self, other: Regime) -> Regime:
        """The batch sizes of both."""
        ends = [regime.last for regime in (self, other) if regime.last is not None]
        return Regime(max(self.first, other.first), min(ends, default=None))


@dataclass(frozen=True)
class Contraction:
    """One parameter's part of the plan.

    ``form``: its uses as einsums. ``strategy``: the recipe's; ``label`` says more. ``flops`` (two a multiply-add, of
    matrix products), ``moved`` and ``peak`` bytes, and ``seconds`` are predictions at the plan's batch size;
    ``polynomials`` the first three as polynomials in the batch size ``B``. ``regime``: the batch sizes for which no
    other recipe is predicted to be faster, and ``then`` what is beyond. ``others``: the predicted seconds of the other
    strategies that fit. ``fallback``: why no einsum describes a use, if so. ``key`` tells the terms that the recipe is
    for.
    """

    parameter: str
    uses: int
    form: str
    strategy: str
    label: str
    recipe: Recipe
    flops: int
    moved: int
    peak: int
    seconds: float
    polynomials: tuple[str, str, str]
    regime: Regime
    then: str
    others: tuple[tuple[str, float], ...]
    fallback: str
    key: str

    def row(self) -> tuple[str, ...]:
        """What a table shows of it, ``-`` for nothing."""
        cost = (counted(self.flops), sized(self.peak))
        words = (self.parameter, str(self.uses), self.form, self.label, self.chunks or "-")
        return (*words, *cost, str(self.regime), self.then or "-", self.fallback or "-")

    @property
    def chunks(self) -> str:
        """How the work is cut, or ``""`` where it is not."""
        recipe = self.recipe
        unit = "tokens" if recipe.strategy == "pairwise" else "rows"
        parts = [f"{recipe.chunk} {unit}"] if recipe.chunk else []
        parts += [f"{recipe.samples} samples"] if recipe.samples else []
        parts += [f"{recipe.parts} blocks"] if recipe.parts > 1 else []
        return " x ".join(parts) + (", made again" if recipe.remake else "")


@dataclass(frozen=True)
class Totals:
    """Of the whole step and of a plain forward and backward: flops, and bytes alive above parameters and inputs."""

    flops: int
    peak: int
    plain_flops: int
    plain_peak: int


@dataclass(frozen=True)
class Plan:
    """The contractions of all parameters at one batch size, and the batch sizes it holds for.

    ``budget``: bytes above a plain forward and backward that the step may use. ``machine``: the device planned for.
    ``gradient``: ``"kept"`` where activations and cotangents stay for a backward, ``saved`` bytes of them, or
    ``"replayed"`` where it runs the model anew.
    """

    batch: int
    regime: Regime
    budget: int
    machine: str
    contractions: tuple[Contraction, ...]
    totals: Totals
    gradient: Literal["kept", "replayed"] = "replayed"
    saved: int = 0

    def to_json(self) -> str:
        """A string that :meth:`from_json` reads."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of :meth:`to_json`. Raises :class:`gramfx.errors.InputError` for anything else."""
        try:
            held = json.loads(text)
            contractions = tuple(_contraction(one) for one in held.pop("contractions"))
            regime, totals = Regime(**held.pop("regime")), Totals(**held.pop("totals"))
            return Plan(contractions=contractions, regime=regime, totals=totals, **held)
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise InputError("this is no plan", expected="what Plan.to_json wrote", got=str(problem)) from problem

    def of(self, parameter: str) -> Contraction | None:
        """The contraction of a parameter by name."""
        return next((one for one in self.contractions if one.parameter == parameter), None)

    def forced(self, strategy: str) -> Plan:
        """The same plan with ``strategy``, all at once, for every parameter that allows it."""

        def changed(one: Contraction) -> Contraction:
            if strategy not in (one.recipe.strategy, *(name for name, _ in one.others)):
                return one
            whole = Recipe(strategy, batch=one.recipe.batch, balance=one.recipe.balance)
            return dataclasses.replace(one, recipe=whole, strategy=strategy, label=strategy)

        return dataclasses.replace(self, contractions=tuple(map(changed, self.contractions)))

    def __str__(self) -> str:
        head = ("parameter", "uses", "form", "strategy", "chunks", "flops", "peak", "batch", "then", "fallback")
        total = self.totals
        lines = [
            *table([head, *(one.row() for one in self.contractions)]),
            f"batch {self.regime}, planned at {self.batch} for {self.machine}",
            f"flops {counted(total.flops)}, a plain forward and backward {counted(total.plain_flops)}",
            f"peak {sized(total.peak)}, a plain forward and backward {sized(total.plain_peak)}, "
            f"budget {sized(self.budget)} above",
            f"gradient kept, {sized(self.saved)}" if self.gradient == "kept" else "gradient replayed",
        ]
        return "\n".join(lines)

    def print(self) -> None:
        """Print a table, a line a parameter, and the totals."""
        print(self)


def _contraction(held: dict[str, Any]) -> Contraction:
    held["others"] = tuple((name, seconds) for name, seconds in held["others"])
    flops, moved, peak = held.pop("polynomials")
    recipe, regime = Recipe(**held.pop("recipe")), Regime(**held.pop("regime"))
    return Contraction(recipe=recipe, regime=regime, polynomials=(flops, moved, peak), **held)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns in line; columns that hold nothing but ``-`` are left out."""
    shown = [i for i in range(len(rows[0])) if any(row[i] != "-" for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in shown}
    return ["  ".join(row[i].ljust(widths[i]) for i in shown).rstrip() for row in rows]


def counted(number: float) -> str:
    """``1.23 G`` for 1 230 000 000."""
    power = 0
    while abs(number) >= 1000 and power < 5:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {['', 'k', 'M', 'G', 'T', 'P'][power]}".strip()


def sized(nbytes: float) -> str:
    """``1.5 MiB`` for 1 572 864 bytes."""
    power = 0
    while abs(nbytes) >= 1024 and power < 3:
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def parse_bytes(given: int | str) -> int:
    """Bytes from a number, or from a string as ``"512MiB"``; raises :class:`gramfx.errors.InputError`."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", given) if isinstance(given, str) else None
    if found and found[2] in _UNITS:
        return int(float(found[1]) * _UNITS[found[2]])
    raise InputError(
        "memory_budget is no number of bytes", expected="an int of at least 0, or a string as '512MiB'", got=repr(given)
    )
