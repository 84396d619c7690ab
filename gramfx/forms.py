"""How one op reads one parameter value: the form of that use's gradient, before any axis is known.

    grad[sample, parameter dims] = sum over everything else of  cotangent * factors

Labels name extents within one form. Each dim of a tensor is spelled as a tuple of labels, outermost first, so that a
channel dim can be (group, channel). A label that the parameter does not have is summed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.fx import Node

Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Windows:
    """The patches that a convolution's kernel sees: ``[N, C, *L] -> [N, C, *out, *kernel]``."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    out: tuple[int, ...]


@dataclass(frozen=True)
class OneHot:
    """Integers read as the one-hot vectors of ``classes`` entries; those equal to ``ignored`` as zero."""

    classes: int
    ignored: int


@dataclass(frozen=True)
class FormFactor:
    """A tensor of a form: a node of the forward graph, or the cotangent (``node=None``), as seen through ``view``."""

    node: Node | None
    dims: Dims
    view: Windows | OneHot | None = None


@dataclass(frozen=True)
class Form:
    """The gradient of one use. ``tap`` says whose cotangent it needs: that of the op's output, of the operand, or of
    another node that only the op reads.

    ``output`` spells the op's output (the first of several), to find the batch by; ``sizes`` holds the extents of
    labels that are not whole dims of some factor.
    """

    tap: Literal["output", "operand"] | Node
    factors: tuple[FormFactor, ...]
    parameter: Dims
    output: Dims
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def cotangent(self) -> FormFactor:
        """The factor that comes back from the objectives."""
        return next(factor for factor in self.factors if factor.node is None)


def letters(prefix: str, count: int) -> Dims:
    """``count`` dims of one fresh label each."""
    return tuple((f"{prefix}{index}",) for index in range(count))
