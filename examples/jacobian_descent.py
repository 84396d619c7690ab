"""Per-sample Jacobian descent on handwritten digits: UPGrad weights from TorchJD, Gramians from gramfx.

The same training runs with TorchJD's own engine, and the two curves of the loss are one. Needs ``pip install
'.[interop,demo]'``; ``--picture digits.svg`` draws the curves, which needs matplotlib.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchjd.aggregation import UPGradWeighting
from torchjd.autogram import Engine

import gramfx


def data(count: int = 512) -> tuple[Tensor, Tensor]:
    """Images ``[count, 64]`` from 0 to 1 and their digits."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images[:count]) / 16, torch.from_numpy(labels[:count])


def train(engine_of: Callable[[nn.Module], Any], epochs: int = 2, batch: int = 16) -> list[float]:
    """The mean loss of every batch; only the engine is different from call to call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    engine, weighting = engine_of(model), UPGradWeighting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    criterion = nn.CrossEntropyLoss(reduction="none")
    images, labels = data()
    curve = []
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(batch):
            losses = criterion(model(images[chosen]), labels[chosen])
            weights = weighting(engine.compute_gramian(losses))
            optimizer.zero_grad()
            losses.backward(weights)
            optimizer.step()
            curve.append(losses.detach().mean().item())
    return curve


def draw(curves: dict[str, list[float]], path: str) -> None:
    """Both curves, one as a wide line under the other."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for (name, curve), width, alpha in zip(curves.items(), (5, 1.2), (0.4, 1), strict=True):
        axes.plot(curve, label=name, linewidth=width, alpha=alpha)
    axes.set(xlabel="step", ylabel="mean loss of the batch", title="UPGrad on digits, float64, one seed")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Train twice, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", metavar="PATH", help="an SVG file of the two curves")
    picture = parser.parse_args().picture
    curves = {
        "TorchJD's Engine": train(lambda model: Engine(model, batch_dim=0)),
        "gramfx.Engine": train(lambda model: gramfx.Engine(model, batch_dim=0, compile=False)),
    }
    theirs, ours = curves.values()
    apart = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    assert apart <= 1e-6
    assert sum(ours[-5:]) < 0.5 * sum(ours[:5])
    print(f"{len(ours)} steps, loss {ours[0]:.3f} -> {ours[-1]:.3f}; the curves differ by {apart:.1e} at most")
    if picture:
        draw(curves, picture)


if __name__ == "__main__":
    main()
