"""The empirical neural tangent kernel of a network with several outputs, and what it predicts for one small step."""

import torch
from torch import nn

import gramfx


def main() -> None:
    """Outputs change by ``-η Θ (f - y)`` to first order in the learning rate η (Jacot et al. 2018)."""
    torch.manual_seed(0)
    batch, outputs, rate = 12, 3, 1e-6
    model = nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, outputs)).double()
    inputs, wanted = torch.randn(batch, 4).double(), torch.randn(batch, outputs).double()

    step = gramfx.transform(model, compile=False)  # no objective: every output entry is one
    values, gramian = step(inputs)
    kernel = gramian.reshape(batch, outputs, batch, outputs)
    residual = (values - wanted).detach()
    predicted = -rate * torch.einsum("bkcl,cl->bk", kernel, residual)

    values.backward(residual)
    torch.optim.SGD(model.parameters(), lr=rate).step()
    moved = model(inputs) - values
    error = ((moved - predicted).norm() / predicted.norm()).item()

    assert error < 1e-3
    smallest = torch.linalg.eigvalsh(gramian)[0].item()
    print(f"kernel {tuple(kernel.shape)}, smallest eigenvalue {smallest:.2e}")
    print(f"one gradient step moves the outputs as the kernel predicts, to a relative {error:.1e}")


if __name__ == "__main__":
    main()
