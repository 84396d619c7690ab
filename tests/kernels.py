"""What the tests of kernels share: references that form the Jacobian, and checks run in triton's interpreter.

The interpreter is chosen where triton is imported, so that these checks run in a process of their own.
"""

import contextlib
import dataclasses
import importlib.util
import math
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor, nn

from gramfx import pairwise_aten

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of random factors. ``lengths`` for ragged samples; ``masked``: some tokens have no cotangent; ``classes``
    for ids. ``layout``: how ``[samples, tokens, ...]`` lies in memory."""

    samples: int
    tokens: int
    inputs: int
    outputs: int
    dtype: torch.dtype = torch.float32
    lengths: tuple[int, ...] = ()
    masked: bool = False
    classes: int = 0
    ignored: int = -1
    layout: str = "rows"
    seed: int = 0

    @property
    def offsets(self) -> Tensor | None:
        """Of ragged samples."""
        return torch.tensor([0, *self.lengths]).cumsum(0) if self.lengths else None

    @property
    def longest(self) -> int:
        """The most tokens that a ragged sample has."""
        return max(self.lengths, default=0)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Activation, or ids, and cotangent."""
        torch.manual_seed(self.seed)
        lead = (sum(self.lengths),) if self.lengths else (self.samples, self.tokens)
        act, cot = (_laid_out(lead, width, self.layout).to(self.dtype) for width in (self.inputs, self.outputs))
        if self.masked:
            cot = cot * torch.randint(2, (*lead, 1))
        return (torch.randint(self.classes, lead) if self.classes else act), cot


def _laid_out(lead: tuple[int, ...], width: int, layout: str) -> Tensor:
    if layout == "tokens first":
        return torch.randn(*reversed(lead), width).transpose(0, 1)
    if layout == "the same for all samples":
        return torch.randn(*lead[1:], width).expand(*lead, width)
    if layout == "every second number":
        return torch.randn(*lead, 2 * width)[..., ::2]
    return torch.randn(*lead, width)


def padded(case: Case, act: Tensor, cot: Tensor) -> tuple[Tensor, Tensor]:
    """Dense factors ``[samples, tokens, ...]`` in float64, ids as one-hot vectors, zeros behind ragged samples."""
    if case.classes:
        act = nn.functional.one_hot(act, case.classes) * (act != case.ignored).unsqueeze(-1)
    act, cot = act.double(), cot.double()
    if not case.lengths:
        return act, cot
    runs = (list(one.split(list(case.lengths))) for one in (act, cot))
    left, right = (nn.utils.rnn.pad_sequence(run, batch_first=True) for run in runs)
    return left, right


def by_jacobian(case: Case, act: Tensor, cot: Tensor) -> tuple[Tensor, Tensor]:
    """The Gramian in float64, and what bounds the rounding of each entry: its terms with all signs dropped."""
    left, right = padded(case, act, cot)
    jacobian, sizes = (
        torch.einsum("ntd,ntp->ndp", a, c).flatten(1) for a, c in ((left, right), (left.abs(), right.abs()))
    )
    return jacobian @ jacobian.t(), sizes @ sizes.t()


def roundings(case: Case, got: Tensor, want: Tensor, sizes: Tensor) -> float:
    """The largest error over what rounding in float32 may amount to: below 1 it is nothing else.

    ``n`` products summed are off by ``n eps`` of their sizes (Higham, Accuracy and Stability of Numerical Algorithms,
    section 3.1). Sums over the rows and columns of a tile, 128 at most, are taken two by two.
    """
    steps = case.inputs + case.outputs + 2 * 7
    bound = steps * torch.finfo(torch.float32).eps * sizes + torch.finfo(torch.float32).tiny
    return float(((got.double() - want).abs() / bound).max()) if got.numel() else 0.0


# ---------------------------------------------------------------- in the interpreter


def interpreted(case: Case) -> tuple[float, float, bool]:
    """Roundings of the Gramian and of the norms, and whether the Gramian is symmetric bit for bit."""
    from gramfx.pairwise_launch import gram_on_gpu, norms_on_gpu

    act, cot = case.factors()
    want, sizes = by_jacobian(case, act, cot)
    given = (act, cot, case.offsets, case.longest, case.ignored, "ieee")
    gram, norms = gram_on_gpu(*given), norms_on_gpu(*given)
    of_norms = roundings(case, norms, want.diagonal(), sizes.diagonal())
    return roundings(case, gram, want, sizes), of_norms, torch.equal(gram, gram.t())


def interpreted_gathered(case: Case, heads: int) -> float:
    """Roundings of the part between both uses of a table, ``heads`` tokens a sample where it is multiplied with."""
    from gramfx.pairwise_launch import gathered_on_gpu

    ids, left = case.factors()
    head = torch.randn(case.samples, heads, case.classes).to(case.dtype)
    right = torch.randn(case.samples, heads, case.outputs).to(case.dtype)
    chosen, wide = padded(case, ids, left)
    want = _between(chosen, wide, head.double(), right.double())
    sizes = _between(chosen, wide.abs(), head.double().abs(), right.double().abs())
    got = gathered_on_gpu(ids, left, head, right, torch.full((case.samples,), math.inf), case.ignored, "ieee")
    exact = gathered_on_gpu(ids, left, head, right, torch.zeros(case.samples), case.ignored, "ieee")
    eps = torch.finfo(torch.float32).eps
    assert ((exact.double() - want).abs() <= eps * want.abs() + torch.finfo(torch.float32).tiny).all()
    return roundings(case, got, want, sizes)


def _between(chosen: Tensor, left: Tensor, head: Tensor, right: Tensor) -> Tensor:
    read = torch.einsum("ntv,ntd->nvd", chosen, left).flatten(1)
    multiplied = torch.einsum("nsv,nsd->nvd", head, right).flatten(1)
    return read @ multiplied.t() + multiplied @ read.t()


def cancelling(samples: int, tokens: int, width: int, apart: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors of which each token's gradient is nearly undone by another's; those of sample 0 are not."""
    torch.manual_seed(0)
    one, other = (torch.randn(samples, tokens, size) for size in (width, 3))
    act = torch.cat([one, one + apart * torch.randn(samples, tokens, width)], 1)
    cot = torch.cat([other, -other], 1)
    act[0], cot[0] = torch.randn(2 * tokens, width), torch.randn(2 * tokens, 3)
    return act.to(dtype), cot.to(dtype)


def interpreted_cancelling(apart: float, dtype: torch.dtype, guarded: bool) -> tuple[float, float]:
    """The largest errors of the Gramian and of the norms, of the size of the gradients."""
    from gramfx.pairwise_launch import gram_on_gpu, norms_on_gpu

    act, cot = cancelling(3, 16, 8, apart, dtype)
    want = pairwise_aten.gram(act, cot, -1)
    size = want.diagonal().sqrt()
    with contextlib.nullcontext() if guarded else unguarded():
        gram, norms = (run(act, cot, None, 0, -1, "ieee").double() for run in (gram_on_gpu, norms_on_gpu))
    of_gram = ((gram - want).abs() / size / size.unsqueeze(1)).max()
    return float(of_gram), float(((norms - want.diagonal()).abs() / want.diagonal()).max())


def guard_changes(case: Case) -> bool:
    """Whether the guard has anything to do."""
    from gramfx.pairwise_launch import gram_on_gpu

    act, cot = case.factors()
    given = (act, cot, case.offsets, case.longest, case.ignored, "ieee")
    with unguarded():
        without = gram_on_gpu(*given)
    return not torch.equal(gram_on_gpu(*given), without)


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """No sizes are so large that an entry is taken once more."""
    from gramfx import pairwise_launch

    with mock.patch.object(pairwise_launch, "LIMITS", {"ieee": 1e30}):
        yield
