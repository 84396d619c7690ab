"""Two tasks on a shared trunk: objectives that are means over the batch, one per task and none per sample."""

from itertools import pairwise

import torch
from torch import Tensor, nn

import gramfx
from gramfx.cli.min_norm import min_norm_weights


class TwoTasks(nn.Module):
    """A shared trunk with a regression head and a classification head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
        self.size, self.kind = nn.Linear(32, 1), nn.Linear(32, 3)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted sizes ``[b]`` and logits ``[b, 3]``."""
        features = self.trunk(inputs)
        return self.size(features).squeeze(1), self.kind(features)


def task_losses(outputs: tuple[Tensor, Tensor], sizes: Tensor, kinds: Tensor) -> Tensor:
    """One mean loss per task: ``[2]``."""
    return torch.stack([nn.functional.mse_loss(outputs[0], sizes), nn.functional.cross_entropy(outputs[1], kinds)])


def main() -> None:
    """Descend along a direction in which neither task gets worse."""
    torch.manual_seed(0)
    model, inputs = TwoTasks(), torch.randn(64, 8)
    sizes, kinds = 3 * inputs[:, 0] - inputs[:, 1], (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()

    # in_dims=None: no dim of the inputs counts objectives.
    step = gramfx.transform(model, task_losses, in_dims=None, compile=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for _ in range(60):
        losses, gramian = step(inputs, targets=(sizes, kinds))
        optimizer.zero_grad()
        losses.backward(min_norm_weights(gramian).to(losses))
        optimizer.step()
        history.append(losses.detach())

    first, last = history[0], history[-1]
    assert bool((last < first).all()), "both tasks improve"
    assert all(bool((after <= before + 1e-3).all()) for before, after in pairwise(history))
    print(f"size loss {first[0]:.3f} -> {last[0]:.3f}, kind loss {first[1]:.3f} -> {last[1]:.3f}; neither ever grew")


if __name__ == "__main__":
    main()
