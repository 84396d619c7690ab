"""``gramfx::gramian``, the node that stands for one parameter's summand of the Gramian until it is lowered."""

from __future__ import annotations

import torch
from torch import Tensor

from gramfx.emit import gramian_of
from gramfx.terms import ParameterTerms


@torch.library.custom_op("gramfx::gramian", mutates_args=())
def gramian(factors: list[Tensor], objectives: Tensor, terms: str, dtype: torch.dtype) -> Tensor:
    """``J Jᵀ`` of one parameter, ``[m, m]`` in ``dtype``; ``terms`` is a :class:`ParameterTerms` as JSON."""
    return gramian_of(ParameterTerms.from_json(terms), factors, dtype)


@gramian.register_fake
def _(factors: list[Tensor], objectives: Tensor, terms: str, dtype: torch.dtype) -> Tensor:
    return objectives.new_empty(objectives.numel(), objectives.numel(), dtype=dtype)


GRAMIAN = torch.ops.gramfx.gramian.default
