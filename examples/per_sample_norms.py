"""Per-sample gradient norms from the Gramian's diagonal, and clipped gradients from one backward pass (DP-SGD)."""

import torch
from torch import nn

import gramfx

CLIP = 4.5


def main() -> None:
    """Compare norms and the clipped gradient with one backward pass per sample."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 5))
    inputs, labels = torch.randn(16, 20), torch.randint(5, (16,))
    objective = nn.CrossEntropyLoss(reduction="none")

    step = gramfx.transform(model, objective, compile=False)
    losses, gramian = step(inputs, targets=labels)
    norms = gramian.diagonal().sqrt()
    losses.backward((CLIP / norms).clamp(max=1))  # fills .grad with the sum of the clipped gradients
    clipped = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    rows = []
    for loss in objective(model(inputs), labels):
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    jacobian = torch.stack(rows)
    wanted = (jacobian * (CLIP / jacobian.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)

    torch.testing.assert_close(norms, jacobian.norm(dim=1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(clipped, wanted, rtol=1e-4, atol=1e-5)
    print(f"norms of {len(norms)} gradients: {norms.min():.3f} to {norms.max():.3f}")
    print(f"clipped at {CLIP}: {int((norms > CLIP).sum())}, and the clipped sum is exact")


if __name__ == "__main__":
    main()
