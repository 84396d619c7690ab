"""Models to try the command line on: ``gramfx dump examples/models.py:Tied --input 'i64[4,6]<11'``."""

import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """A language model of which the embedding and the head are one parameter."""

    def __init__(self, words: int = 11, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """From ``[batch, tokens]`` to ``[batch, tokens, words]``."""
        return self.head(torch.tanh(self.embedding(ids)))


def loss_per_sequence(logits: Tensor, ids: Tensor) -> Tensor:
    """``[batch]``: the cross entropy of all tokens."""
    return nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none").sum(1)


def convolutions(channels: int = 8, classes: int = 10) -> nn.Module:
    """A small network for images of 8 x 8 with a batch norm, which couples the samples."""
    return nn.Sequential(
        *(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(channels * 16, classes)),
    )


if __name__ == "__main__":
    ids = torch.randint(11, (4, 6))
    print("one loss a sequence:", loss_per_sequence(Tied()(ids), ids).tolist())
