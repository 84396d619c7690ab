"""The models that are measured, each with inputs, targets and a loss per sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


@dataclass(frozen=True)
class Workload:
    """A model and what one step is given."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    targets: Tensor
    objective: Callable[[Tensor, Tensor], Tensor]

    def losses(self) -> Tensor:
        """One a sample."""
        return self.objective(self.model(*self.inputs), self.targets)

    def plain(self, losses: Callable[[], Tensor] | None = None) -> None:
        """Forward and backward, from no gradients; ``losses`` may be compiled."""
        self.model.zero_grad(set_to_none=True)
        (losses or self.losses)().sum().backward()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over tokens, if there are any."""
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return losses.view(labels.shape[0], -1).mean(1)


def squared_error(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over all dims but the first."""
    return F.mse_loss(output, targets, reduction="none").flatten(1).mean(1)


def alexnet(batch: int = 32, part: int = 1, pixels: int = 224) -> Workload:
    """The layers of torchvision's AlexNet; of its widths, one ``part``-th."""
    widths = [width // part for width in (64, 192, 384, 256, 4096, 1000)]
    first, second, third, fourth, hidden, classes = widths
    features = nn.Sequential(
        *(nn.Conv2d(3, first, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(first, second, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(second, third, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(third, fourth, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(fourth, fourth, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
    )
    classifier = nn.Sequential(
        *(nn.Dropout(), nn.Linear(fourth * 6 * 6, hidden), nn.ReLU(inplace=True)),
        *(nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
        nn.Linear(hidden, classes),
    )
    model = nn.Sequential(features, nn.AdaptiveAvgPool2d((6, 6)), nn.Flatten(), classifier)
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(classes, (batch,))
    return Workload(model, (images,), labels, cross_entropy)


def transformer(batch: int = 8, dropout: float = 0.1, part: int = 1) -> Workload:
    """``nn.Transformer`` as it comes, from 10 tokens to 20; of its widths and depth, one ``part``-th."""
    width, depth = 512 // part, max(1, 6 // part)
    source, target = torch.randn(batch, 10, width), torch.randn(batch, 20, width)
    model = nn.Transformer(width, 8, depth, depth, 2048 // part, dropout, batch_first=True)
    return Workload(model, (source, target), torch.randn(batch, 20, width), squared_error)


def mlp(batch: int = 64) -> Workload:
    """3072-512-512-10."""
    layers = (nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return Workload(nn.Sequential(*layers), (torch.randn(batch, 3072),), torch.randint(10, (batch,)), cross_entropy)


class LanguageModel(nn.Module):
    """A causal transformer whose output layer is its embedding."""

    mask: Tensor
    places: Tensor

    def __init__(
        self,
        vocabulary: int = 50257,
        width: int = 256,
        layers: int = 4,
        tokens: int = 64,
        heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(tokens))
        self.register_buffer("places", torch.arange(tokens))

    def forward(self, words: Tensor) -> Tensor:
        """Scores for the next word at each place."""
        hidden = self.embedding(words) + self.position(self.places)
        scores: Tensor = self.head(self.norm(self.body(hidden, mask=self.mask, is_causal=True)))
        return scores


def lm(batch: int = 8) -> Workload:
    """A tied language model on 64 tokens."""
    words = torch.randint(50257, (batch, 65))
    return Workload(LanguageModel(), (words[:, :-1],), words[:, 1:], cross_entropy)


def gpt2(batch: int = 8, tokens: int = 256, part: int = 1) -> Workload:
    """The sizes of GPT-2 small, on fewer tokens and without dropout; of vocabulary, width and depth one ``part``-th."""
    vocabulary, layers, heads = 50257 // part, max(1, 12 // part), max(1, 12 // part)
    model = LanguageModel(vocabulary, 64 * heads, layers, tokens, heads, dropout=0.0)
    words = torch.randint(vocabulary, (batch, tokens + 1))
    return Workload(model, (words[:, :-1],), words[:, 1:], cross_entropy)


def convolutions(batch: int = 16) -> Workload:
    """Two convolutions with many channels on maps of 16 x 16."""
    layers = (nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 128, 3, padding=1))
    return Workload(
        nn.Sequential(*layers), (torch.randn(batch, 64, 16, 16),), torch.randn(batch, 128, 16, 16), squared_error
    )


def tokens(batch: int = 16) -> Workload:
    """Linear layers on 64 tokens a sample."""
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
    return Workload(model, (torch.randn(batch, 64, 512),), torch.randn(batch, 64, 512), squared_error)


def weight_normed(batch: int = 16) -> Workload:
    """Linear layers whose weights are functions of their parameters."""
    layers = (weight_norm(nn.Linear(512, 512)), nn.Tanh(), weight_norm(nn.Linear(512, 256)))
    return Workload(nn.Sequential(*layers), (torch.randn(batch, 512),), torch.randn(batch, 256), squared_error)


class Recurrent(nn.Module):
    """An LSTM whose last output is classified."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, sequences: Tensor) -> Tensor:
        """Scores."""
        scores: Tensor = self.head(self.body(sequences)[0][:, -1])
        return scores


def lstm(batch: int = 16) -> Workload:
    """An LSTM of 256 units over 100 steps."""
    return Workload(Recurrent(), (torch.randn(batch, 100, 256),), torch.randint(10, (batch,)), cross_entropy)


MODELS: dict[str, Callable[..., Workload]] = {"alexnet": alexnet, "transformer": transformer, "mlp": mlp, "lm": lm}
#: For measurements that need many steps.
SMALL: dict[str, Callable[..., Workload]] = {
    "convolutions": convolutions,
    "tokens": tokens,
    "weight_normed": weight_normed,
}
#: Whose loops over time torch hides in one op.
LOOPS: dict[str, Callable[..., Workload]] = {"lstm": lstm}
#: For peers that cannot draw random numbers.
CALM: dict[str, Callable[..., Workload]] = {"transformer_without_dropout": partial(transformer, dropout=0.0)}
#: For a GPU, at the batch sizes that occupy it, and so small that any machine runs them.
LARGE: dict[str, Callable[..., Workload]] = {
    "alexnet": partial(alexnet, 128),
    "transformer": partial(transformer, 256, 0.0),
    "gpt2": partial(gpt2, 16),
}
TINY: dict[str, Callable[..., Workload]] = {
    "alexnet": partial(alexnet, 3, part=16, pixels=64),
    "transformer": partial(transformer, 3, 0.0, part=32),
    "gpt2": partial(gpt2, 3, tokens=8, part=200),
}


def workload(name: str, batch: int | None = None, device: str = "cpu") -> Workload:
    """A model by name, the same at every call; ``batch``: the model's own by default."""
    torch.manual_seed(0)
    make = {**MODELS, **SMALL, **LOOPS, **CALM}[name]
    with torch.device(device):
        return make() if batch is None else make(batch)
