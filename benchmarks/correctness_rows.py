"""The situations of :mod:`benchmarks.correctness`: a small model, inputs and an objective per sample each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from benchmarks.correctness_modules import Applied, Centred, Mixture, Scaled, Spectral, StraightThrough
from benchmarks.models import Workload

SAMPLES, TOKENS, WORDS = 4, 3, 7


@dataclass(frozen=True)
class Situation:
    """What is built anew for each system, and the largest relative error that counts as exact.

    ``coupled``: an objective depends on other samples' activations, which per-sample gradients by their nature exclude.
    """

    build: Callable[[], Workload]
    coupled: bool = False
    limit: float = 1e-9


def distance(output: Tensor, targets: Tensor) -> Tensor:
    """A squared distance per sample; ``targets: [samples, 1]``."""
    return (output.flatten(1) - targets).square().mean(1)


def contrast(output: Tensor, targets: Tensor) -> Tensor:
    """InfoNCE between the halves of the features, with the whole batch for negatives; no targets are needed."""
    left, right = (F.normalize(half, dim=1) for half in output.chunk(2, 1))
    return F.cross_entropy(left @ right.T / 0.2, torch.arange(len(output)), reduction="none")


# ---------------------------------------------------------------- how they are put together


def workload(model: nn.Module, *inputs: Tensor, objective: Callable[[Tensor, Tensor], Tensor] = distance) -> Workload:
    """With targets, one per sample."""
    return Workload(model, inputs, torch.randn(SAMPLES, 1), objective)


def chain(*layers: nn.Module) -> Workload:
    """Layers, of which the first takes three features, one after the other."""
    return workload(nn.Sequential(*layers), torch.randn(SAMPLES, 3))


def images(first: nn.Module, channels: int) -> Workload:
    """A layer on images of 5 x 5, and a convolution after it."""
    return workload(nn.Sequential(first, nn.Tanh(), nn.Conv2d(channels, 2, 1)), torch.randn(SAMPLES, 4, 5, 5))


def applied(function: Callable[..., Tensor], **modules: nn.Module) -> Workload:
    """A function of modules and three features."""
    return workload(Applied(function, **modules), torch.randn(SAMPLES, 3))


def tokens(function: Callable[..., Tensor], width: int = 4, **modules: nn.Module) -> Workload:
    """A function of modules and a few features for each token."""
    return workload(Applied(function, **modules), torch.randn(SAMPLES, TOKENS, width))


def words(function: Callable[..., Tensor], **modules: nn.Module) -> Workload:
    """A function of modules and the ids of words, of which the first is padding."""
    ids = torch.cat([torch.zeros(SAMPLES, 1, dtype=torch.long), torch.randint(WORDS, (SAMPLES, TOKENS - 1))], 1)
    return workload(Applied(function, **modules), ids)


def tied() -> Workload:
    """A head whose weight is the embedding's."""
    embedding, head = nn.Embedding(WORDS, 5), nn.Linear(5, WORDS, bias=False)
    head.weight = embedding.weight
    return words(lambda m, ids: m["head"](m["embedding"](ids).tanh()), embedding=embedding, head=head)


def packed() -> Workload:
    """An LSTM on sequences of several lengths."""

    def run(m: nn.ModuleDict, x: Tensor, lengths: Tensor) -> Tensor:
        rows = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(m["layer"](rows)[0], batch_first=True, total_length=TOKENS)[0]

    model = Applied(run, layer=nn.LSTM(4, 5, batch_first=True))
    return workload(model, torch.randn(SAMPLES, TOKENS, 4), torch.tensor([3, 1, 2, 3]))


def normalized(training: bool) -> Workload:
    """BatchNorm by the batch's own statistics, or by those that it was given."""
    norm = nn.BatchNorm1d(5, track_running_stats=not training).train(training)
    if not training:
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return chain(nn.Linear(3, 5), norm, nn.Tanh(), nn.Linear(5, 2))


def distributed() -> Workload:
    """Wrapped for data parallelism in a group of one."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    inner = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    return workload(nn.parallel.DistributedDataParallel(inner), torch.randn(SAMPLES, 3))


def frozen() -> Workload:
    """A layer of which the bias alone is learned."""
    layer = nn.Linear(3, 5)
    layer.weight.requires_grad_(False)
    return chain(layer, nn.Tanh(), nn.Linear(5, 2))


def residual() -> Workload:
    """The residual of a differential equation, for which the network is differentiated by its input."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(m["net"](x).sum(), x, create_graph=True)
        return slope.sum(1, keepdim=True) + x.sin()

    return applied(run, net=nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)))


def jagged() -> Workload:
    """Sequences of several lengths as one nested tensor."""
    rows = torch.nested.nested_tensor([torch.randn(n, 3) for n in (2, 3, 1, 2)], layout=torch.jagged)
    model = Applied(lambda m, x: torch.nested.to_padded_tensor(m["layer"](x).tanh(), 0.0), layer=nn.Linear(3, 4))
    return workload(model, rows)


def mixed() -> Workload:
    """Under autocast, which leaves float64 alone: parameters and inputs are float32."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m["last"](m["first"](x).tanh()).float()

    held = applied(run, first=nn.Linear(3, 5), last=nn.Linear(5, 2))
    return Workload(held.model.float(), tuple(x.float() for x in held.inputs), held.targets.float(), held.objective)


# ---------------------------------------------------------------- the table

SITUATIONS: dict[str, Situation] = {
    "linear on 4-D input": Situation(
        lambda: workload(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(SAMPLES, 2, 3, 3))
    ),
    "conv, groups": Situation(lambda: images(nn.Conv2d(4, 6, 3, groups=2), 6)),
    "conv, circular": Situation(lambda: images(nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"), 3)),
    "conv, reflect": Situation(lambda: images(nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"), 3)),
    "conv, transposed": Situation(lambda: images(nn.ConvTranspose2d(4, 3, 3, stride=2), 3)),
    "module used twice": Situation(
        lambda: applied(lambda m, x: m["layer"](m["layer"](x).tanh()), layer=nn.Linear(3, 3))
    ),
    "tied embedding and head": Situation(tied),
    "child's parameter used": Situation(
        lambda: applied(lambda m, x: F.linear(m["layer"](x).tanh(), m["layer"].weight), layer=nn.Linear(3, 3))
    ),
    "embedding, padding_idx": Situation(
        lambda: words(
            lambda m, ids: m["head"](m["embedding"](ids).tanh()),
            embedding=nn.Embedding(WORDS, 5, padding_idx=0),
            head=nn.Linear(5, 2),
        )
    ),
    "positions as [1, T] ids": Situation(
        lambda: words(
            lambda m, ids: m["head"]((m["word"](ids) + m["place"](torch.arange(TOKENS)[None])).tanh()),
            word=nn.Embedding(WORDS, 5),
            place=nn.Embedding(TOKENS, 5),
            head=nn.Linear(5, 2),
        )
    ),
    "bare nn.Parameter": Situation(lambda: workload(Scaled(), torch.randn(SAMPLES, 3))),
    "weight_norm": Situation(lambda: chain(weight_norm(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 2))),
    "spectral_norm": Situation(lambda: chain(spectral_norm(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 2))),
    "LSTM": Situation(lambda: tokens(lambda m, x: m["layer"](x)[0], layer=nn.LSTM(4, 5, batch_first=True))),
    "GRU, bidirectional": Situation(
        lambda: tokens(lambda m, x: m["layer"](x)[0], layer=nn.GRU(4, 3, batch_first=True, bidirectional=True))
    ),
    "LSTM, packed": Situation(packed),
    "MultiheadAttention": Situation(
        lambda: tokens(lambda m, x: m["layer"](x, x, x)[0], layer=nn.MultiheadAttention(4, 2, batch_first=True))
    ),
    "ReLU in place": Situation(lambda: chain(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))),
    "dropout": Situation(lambda: chain(nn.Linear(3, 5), nn.Dropout(0.4), nn.Tanh(), nn.Linear(5, 2))),
    "centred activations": Situation(lambda: chain(nn.Linear(3, 5), Centred(), nn.Tanh(), nn.Linear(5, 2)), True),
    "centred inputs": Situation(lambda: chain(Centred(), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))),
    "BatchNorm, training": Situation(partial(normalized, training=True), coupled=True),
    "BatchNorm, eval": Situation(partial(normalized, training=False)),
    "straight-through function": Situation(
        lambda: applied(
            lambda m, x: m["last"](StraightThrough.apply(m["first"](x))), first=nn.Linear(3, 5), last=nn.Linear(5, 2)
        )
    ),
    "checkpointing": Situation(
        lambda: applied(
            lambda m, x: m["last"](checkpoint(m["block"], x, use_reentrant=False)),
            block=nn.Sequential(nn.Linear(3, 5), nn.Tanh()),
            last=nn.Linear(5, 2),
        )
    ),
    "torch.compile'd part": Situation(
        lambda: applied(
            lambda m, x: m["last"](m["first"](x).tanh()),
            first=cast(nn.Module, torch.compile(nn.Linear(3, 5), backend="aot_eager")),
            last=nn.Linear(5, 2),
        )
    ),
    "DistributedDataParallel": Situation(distributed),
    "frozen weight": Situation(frozen),
    "loss over the batch": Situation(
        lambda: workload(nn.Linear(3, 4), torch.randn(SAMPLES, 3), objective=contrast), coupled=True
    ),
    "inner autograd.grad": Situation(residual),
    "complex intermediate": Situation(
        lambda: applied(lambda m, x: torch.fft.rfft(m["layer"](x)).abs(), layer=nn.Linear(3, 4))
    ),
    "complex parameter": Situation(lambda: workload(Spectral(), torch.randn(SAMPLES, 3))),
    "jagged nested tensor": Situation(jagged),
    "mixture, nonzero": Situation(lambda: workload(Mixture(), torch.randn(SAMPLES, 3))),
    "autocast, bfloat16": Situation(mixed, limit=3e-2),
}
