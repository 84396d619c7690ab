"""``gramfx demo``: Jacobian descent on handwritten digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import gramfx
from gramfx.cli.min_norm import balanced_weights
from gramfx.errors import GramfxError

BATCH = 32
RATE = 5e-3
Weighting = Callable[[Tensor], Tensor]
METHODS: dict[str, Weighting] = {
    "average": lambda gramian: gramian.new_full((len(gramian),), 1 / len(gramian)),
    "Jacobian descent": balanced_weights,
}


@dataclass(frozen=True)
class Digits:
    """``images: [n, 1, 8, 8]`` in 0 … 1 and ``labels: [n]``, the first ``samples`` of them to train on."""

    images: Tensor
    labels: Tensor
    samples: int

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """Images and labels to train on."""
        return self.images[: self.samples], self.labels[: self.samples]

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """Images and labels to test on."""
        return self.images[self.samples :], self.labels[self.samples :]


def run(epochs: int, samples: int, seed: int, compile: bool) -> None:
    """Train by every method from the same seed; print how they did and how exact the Gramian is."""
    console = Console()
    digits = load(samples, seed)
    table = Table("weights", "images", "mean loss", "worst loss", "accuracy", title=f"digits, epochs: {epochs}")
    worsened = {}
    with Progress(console=console) as progress:
        for name, weighting in METHODS.items():
            task = progress.add_task(name, total=epochs * len(range(0, samples, BATCH)))
            model = network(seed)
            shares = []
            for share in train(model, digits, weighting, epochs, seed, compile):
                shares.append(share)
                progress.advance(task)
            add_rows(table, name, model, digits)
            worsened[name] = sum(shares) / len(shares)
    console.print(table)
    console.print("images of a batch whose loss an update along Jᵀw would raise, to first order:")
    console.print(*(f"  {name}: {share:.1%}" for name, share in worsened.items()), sep="\n")
    console.print("relative error of the Gramian against one backward pass per image, float64:")
    console.print(f"  {error(digits, seed):.1e}")


def load(samples: int, seed: int) -> Digits:
    """The digits that come with scikit-learn, shuffled."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as missing:
        raise GramfxError(
            "the demo reads the digits that come with scikit-learn, which is not installed",
            remedy="pip install 'gramfx[demo]', or pip install scikit-learn",
        ) from missing
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    return Digits(images[order], torch.tensor(bunch.target)[order], samples)


def network(seed: int) -> nn.Sequential:
    """Two strided convolutions and a linear layer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def train(
    model: nn.Module, digits: Digits, weighting: Weighting, epochs: int, seed: int, compile: bool
) -> Iterator[float]:
    """Yields after each update the share of the batch whose loss has a negative slope ``(G w)_i`` along ``Jᵀ w``."""
    step = gramfx.transform(model, nn.CrossEntropyLoss(reduction="none"), compile=compile)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(seed)
    images, labels = digits.train
    for _ in range(epochs):
        for chosen in torch.randperm(len(images), generator=generator).split(BATCH):
            losses, gramian = step(images[chosen], targets=labels[chosen])
            weights = weighting(gramian).to(losses)
            optimizer.zero_grad()
            losses.backward(weights)
            optimizer.step()
            yield float((gramian @ weights < 0).double().mean())


@torch.no_grad()
def add_rows(table: Table, name: str, model: nn.Module, digits: Digits) -> None:
    """One row for the training images and one for the others."""
    for kind, (images, labels) in (("train", digits.train), ("test", digits.test)):
        outputs = model(images)
        losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
        accuracy = (outputs.argmax(1) == labels).double().mean()
        table.add_row(name, kind, f"{losses.mean():.3f}", f"{losses.max():.3f}", f"{accuracy:.1%}")


def error(digits: Digits, seed: int) -> float:
    """``max|G - J Jᵀ| / max|J Jᵀ|`` on one batch in float64, ``J`` by one backward pass per image."""
    model = network(seed).double()
    images, labels = digits.images[:BATCH].double(), digits.labels[:BATCH]
    objective = nn.CrossEntropyLoss(reduction="none")
    _, gramian = gramfx.transform(model, objective, compile=False)(images, targets=labels)
    rows = []
    for loss in objective(model(images), labels):
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    jacobian = torch.stack(rows)
    wanted = jacobian @ jacobian.T
    return float((gramian - wanted).abs().max() / wanted.abs().max())
