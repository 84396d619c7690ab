"""The table of architectures that everything is tested on, by family. `load` makes one of them concrete."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.architectures.attention import ATTENTION
from tests.architectures.base import (
    Architecture,
    Loaded,
    apply_objective,
    default_dtype,
    load,
    load_alone,
    load_resized,
)
from tests.architectures.convolution import CONVOLUTION
from tests.architectures.coupled import COUPLED, LOOKALIKES
from tests.architectures.derived import DERIVED
from tests.architectures.linear import LINEAR
from tests.architectures.lookup import LOOKUP
from tests.architectures.norms import NORMS
from tests.architectures.recurrent import RECURRENT
from tests.architectures.shapes import SHAPES
from tests.architectures.sharing import SHARING
from tests.architectures.structure import STRUCTURE
from tests.architectures.views import VIEWS
from tests.architectures.vision import VISION

__all__ = [
    "ARCHITECTURES",
    "FAMILIES",
    "FIXED",
    "Architecture",
    "Loaded",
    "apply_objective",
    "default_dtype",
    "load",
    "load_alone",
    "load_resized",
    "named",
    "parameters",
]

FAMILIES: dict[str, list[Architecture]] = {
    "structure": STRUCTURE,
    "sharing": SHARING,
    "linear": LINEAR,
    "norms": NORMS,
    "convolution": CONVOLUTION,
    "lookup": LOOKUP,
    "views": VIEWS,
    "derived": DERIVED,
    "recurrent": RECURRENT,
    "attention": ATTENTION,
    "coupled": COUPLED,
    "lookalikes": LOOKALIKES,
    "shapes": SHAPES,
    "vision": VISION,
}
#: Their forward or objective takes one batch size alone.
FIXED = {
    "flattened_tokens",
    "info_nce",
    "scattered_into_data",
    "samples_permuted",
    "mean_of_pairs",
    "token_order_mixed_up",
    "sample_latents",
    "sample_weights",
    "sample_latents_concatenated",
}
ARCHITECTURES: list[Architecture] = [entry for family in FAMILIES.values() for entry in family]


def named(name: str) -> Architecture:
    """The entry of this name."""
    return next(entry for entry in ARCHITECTURES if entry.name == name)


def parameters(table: Sequence[Architecture] = ARCHITECTURES, always: int = 1) -> list[Any]:
    """The table for `pytest.mark.parametrize`: ids are names, slow entries carry the mark `slow`.

    Where the whole table takes minutes, one entry in `always` runs always and the others are slow too.
    """
    slow = [entry.slow or number % always != 0 for number, entry in enumerate(table)]
    return [pytest.param(e, id=e.name, marks=[pytest.mark.slow] if s else []) for e, s in zip(table, slow, strict=True)]
