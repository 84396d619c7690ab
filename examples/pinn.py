"""Loss balancing of a physics-informed network by the traces of its tangent kernel.

``u'' = -π² sin(πx)`` on [0, 1] with ``u(0) = u(1) = 0``. The equation's residuals have a far larger kernel than the
boundary's, so plain training neglects the boundary. Each term is weighted by ``tr K / tr K_term`` (Wang, Yu and
Perdikaris 2022, "When and why PINNs fail to train"), where ``K_term`` is the Gramian of that term's residuals.
"""

import math

import torch
from torch import Tensor, nn

import gramfx


def network() -> nn.Sequential:
    """From positions ``[n, 1]`` to ``u``, ``[n, 1]``."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)).double()


def equation(net: nn.Module, x: Tensor) -> Tensor:
    """How far the network is from the equation at each point: ``[n]``."""
    x = x.detach().requires_grad_()
    slope = torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]
    bend = torch.autograd.grad(slope.sum(), x, create_graph=True)[0]
    return (bend + math.pi**2 * torch.sin(math.pi * x)).squeeze(1)


def boundary(net: nn.Module, x: Tensor) -> Tensor:
    """How far it is from zero: ``[n]``."""
    held: Tensor = net(x).squeeze(1)
    return held


def train(balanced: bool, steps: int = 400) -> tuple[float, float]:
    """The largest error of ``u`` inside, and at the boundary."""
    net = network()
    inside, ends = torch.linspace(0, 1, 22, dtype=torch.float64)[1:-1, None], torch.tensor([[0.0], [1.0]]).double()
    terms = [(lambda x: equation(net, x), inside), (lambda x: boundary(net, x), ends)]
    steps_of = [gramfx.transform(residuals, compile=False) for residuals, _ in terms]
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    weights = [1.0, 1.0]
    for number in range(steps):
        made = [step(points) for step, (_, points) in zip(steps_of, terms, strict=True)]
        if balanced and number % 20 == 0:
            traces = [float(gramian.trace()) for _, gramian in made]
            weights = [sum(traces) / trace for trace in traces]
        optimizer.zero_grad()
        for (residuals, _), weight in zip(made, weights, strict=True):
            # The gradient of the weighted mean of squares, from the residuals that are there already.
            residuals.backward(2 * weight * residuals.detach() / len(residuals))
        optimizer.step()
    error = (net(inside) - torch.sin(math.pi * inside)).abs().max()
    return error.item(), net(ends).abs().max().item()


def main() -> None:
    """Train with and without balancing."""
    plain, balanced = train(balanced=False), train(balanced=True)
    assert balanced[1] < plain[1]
    assert balanced[0] < plain[0]
    print(f"largest error of u: {plain[0]:.1e} plain, {balanced[0]:.1e} balanced by the traces of the tangent kernel")
    print(f"at the boundary: {plain[1]:.1e} plain, {balanced[1]:.1e} balanced")


if __name__ == "__main__":
    main()
