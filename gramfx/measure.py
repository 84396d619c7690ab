"""Candidates timed on the device instead of predicted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from gramfx.cost import Source
from gramfx.emit import gramian_of
from gramfx.forms import OneHot
from gramfx.planning import Candidate, Problem
from gramfx.terms import ParameterTerms

#: Timed runs after one that is not.
RUNS = 5


def fastest_measured(problem: Problem, found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates by their median time on random tensors of the real sizes, on the problem's device."""
    with torch.random.fork_rng(devices=[problem.device] if problem.device.type == "cuda" else []):
        tensors = [_random(problem, number, source) for number, source in enumerate(problem.sources)]
    times = {id(one): _seconds(one.terms, tensors, problem.dtype) for one in found}
    return sorted(found, key=lambda one: times[id(one)])


def _random(problem: Problem, number: int, source: Source) -> Tensor:
    shape = source.at(problem.batch).shape
    if source.dtype.is_floating_point:
        return torch.randn(shape, device=problem.device, dtype=source.dtype)
    views = [f.view for term in problem.terms.terms for f in term.factors if f.tensor == number]
    classes = min((view.classes for view in views if isinstance(view, OneHot)), default=2)
    return torch.randint(classes, shape, device=problem.device, dtype=source.dtype)


def _seconds(terms: ParameterTerms, tensors: Sequence[Tensor], dtype: torch.dtype) -> float:
    times = []
    with torch.no_grad():
        for _ in range(RUNS + 1):
            start = time.perf_counter()
            gramian_of(terms, tensors, dtype)
            if tensors[0].device.type == "cuda":
                torch.cuda.synchronize(tensors[0].device)
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
