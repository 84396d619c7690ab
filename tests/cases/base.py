"""A case: a situation that real users met, as an architecture with more to say about its answer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.architectures.base import SEED_INPUTS, Architecture, Loaded, default_dtype

Columns = Callable[[str], Tensor]
"""columns(name or module path): the columns of J below it."""


@dataclass(frozen=True, kw_only=True)
class Case(Architecture):
    """One situation; `name` begins with its id. Targets are closed over, as users write it."""

    situation: str
    closed: bool = True
    expect: str = "gramian"
    """'gramian', or the kind of error that is the right answer."""
    deferred: bool = False
    """An error of the product is acceptable too; a wrong number never is."""
    differentiable: bool = True
    """Finite differences of the objectives agree with autograd (not so for detach, custom backward, bfloat16)."""
    claims: Callable[[Tensor, Columns], None] | None = None
    """claims(J, columns): asserts about J."""
    more_inputs: Callable[[], tuple[Any, ...]] | None = None
    """Further inputs for the same module, of another batch size."""

    @property
    def id(self) -> str:
        """The short name, such as c01."""
        return self.name.split("_")[0]

    def with_more_inputs(self, loaded: Loaded) -> Loaded:
        """The same model on the further inputs."""
        assert self.more_inputs is not None
        with default_dtype(loaded.dtype):
            torch.manual_seed(SEED_INPUTS)
            return replace(loaded, args=self.more_inputs())


def zero(values: Tensor) -> None:
    """Asserts that all entries are zero."""
    assert not values.any()


def used(values: Tensor) -> None:
    """Asserts that some entry is not zero."""
    assert values.any()
