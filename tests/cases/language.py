"""Token models, recurrent models and batches of structured data."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from tests.cases.base import Case, Columns, used, zero
from tests.cases.losses import classes, entropy, mean_square


class TiedWords(nn.Module):
    """Looks words up and scores them against one and the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.scores = nn.Linear(4, 7)
        self.scores.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.scores(self.words(ids).tanh())


class NegativeSampling(nn.Module):
    """Skip-gram: the table of contexts is read for one positive and several negative words."""

    def __init__(self) -> None:
        super().__init__()
        self.centre, self.around = nn.Embedding(9, 3), nn.Embedding(9, 3)

    def forward(self, word: Tensor, positive: Tensor, negatives: Tensor) -> Tensor:
        vector = self.centre(word)
        attract = torch.einsum("bd,bd->b", vector, self.around(positive))
        repel = torch.bmm(self.around(negatives), vector[:, :, None])[:, :, 0]
        return -(F.logsigmoid(attract) + F.logsigmoid(-repel).sum(1))


@dataclass
class Prediction:
    """What a language model returns."""

    loss: Tensor
    logits: Tensor


class InOutLinear(nn.Module):
    """A linear layer with its weight stored as [in, out] and applied by addmm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.3 * torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.flatten(0, -2), self.weight)
        return rows.view(*x.shape[:-1], rows.shape[-1])


class CausalBlock(nn.Module):
    """Attention to earlier tokens, then a hidden layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = InOutLinear(width, 3 * width), InOutLinear(width, width)
        self.widen, self.narrow = InOutLinear(width, 2 * width), InOutLinear(2 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        batch, length, width = h.shape
        parts = self.project(self.before(h)).split(width, dim=-1)
        q, k, v = (part.view(batch, length, 2, width // 2).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        return h + self.narrow(F.gelu(self.widen(self.between(h)), approximate="tanh"))


class TinyGPT(nn.Module):
    """Position ids of batch one, a tied head, a dataclass out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.block = nn.Embedding(11, 8), nn.Embedding(5, 8), CausalBlock(8)

    def forward(self, ids: Tensor, labels: Tensor) -> Prediction:
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        logits = self.block(self.words(ids) + self.places(places)) @ self.words.weight.t()
        following = labels[:, 1:]
        losses = F.cross_entropy(logits[:, :-1].mT, following, ignore_index=-100, reduction="none")
        return Prediction(losses.sum(1) / (following != -100).sum(1), logits)


def sentences() -> tuple[Tensor, Tensor]:
    """Ids, and labels that are ignored behind each sentence's end."""
    ids = torch.randint(0, 11, (3, 5))
    return ids, ids.masked_fill(torch.arange(5) >= torch.tensor([[5], [3], [4]]), -100)


class SequenceFirstAttention(nn.Module):
    """Attention keeps the batch on dim 1, the head behind the pooling on dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, kdim=4, vdim=5, add_bias_kv=True)
        self.head = nn.Linear(6, 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        mixed, weights = self.attention(q, k, v, key_padding_mask=padding)
        return self.head(mixed.mean(0)), weights


def attention_inputs() -> tuple[Tensor, ...]:
    """Queries, keys and values, and a padding mask with the batch on dim 0."""
    padding = torch.arange(3) >= torch.tensor([[3], [1], [2], [3]])
    return torch.randn(3, 4, 6), torch.randn(3, 4, 4), torch.randn(3, 4, 5), padding


class PackedLSTM(nn.Module):
    """Reads sequences of unequal length, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        _, (state, _) = self.lstm(pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False))
        return self.head(state[-1])


class TwoTaskGRU(nn.Module):
    """A shared recurrent trunk under two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.GRU(3, 4, num_layers=2, bidirectional=True)
        self.one, self.two = nn.Linear(8, 1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps = self.trunk(x)[0]
        return self.one(steps[-1]), self.two(steps.mean(0))


def task_losses(output: tuple[Tensor, Tensor], *targets: Tensor) -> Tensor:
    """Objectives [2]: the mean square error of each task."""
    return torch.stack([F.mse_loss(o, y) for o, y in zip(output, targets, strict=True)])


def check_tasks(rows: Tensor, cols: Columns) -> None:
    """Neither task sees the other's head."""
    zero(cols("one")[1])
    zero(cols("two")[0])
    used(cols("trunk"))


class MappingModel(nn.Module):
    """Takes the nested mapping a tokenizer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.numbers, self.head = nn.Embedding(6, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, batch: dict[str, Any], *, scale: float = 1.0) -> tuple[tuple[Tensor], dict[str, Tensor]]:
        numbers = batch["extra"]["numbers"]
        mask = batch["mask"][:, :, None].to(numbers.dtype)
        pooled = (self.words(batch["ids"]) * mask).sum(1) / mask.sum(1)
        return (self.head((pooled + self.numbers(numbers)).tanh()) * scale,), {"pooled": pooled}


def mapping() -> tuple[dict[str, Any]]:
    """Ids, their mask and numbers, nested."""
    mask = (torch.arange(3) < torch.tensor([[3], [1], [2], [3]])).long()
    return ({"ids": torch.randint(0, 6, (4, 3)), "mask": mask, "extra": {"numbers": torch.randn(4, 2)}},)


class CheckpointedTranslator(nn.Module):
    """One embedding for both languages, the Transformer recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.core = nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        h = checkpoint(self.core, self.words(source), self.words(target), use_reentrant=False)
        return F.cross_entropy(self.head(h).mT, target, reduction="none").mean(1)


class CountingWords(nn.Module):
    """Embeds ids and counts its calls in an integer buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(6, 3), nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.words(ids).sin().sum(1))


LANGUAGE = [
    Case(
        name="c01_tied_embedding_output",
        situation="One parameter is the embedding table and the output matrix: one block, the sum of both uses.",
        build=TiedWords,
        inputs=lambda: (torch.tensor([1, 5, 1, 0, 6]),),
        objective=entropy,
        targets=classes(5, 1, 2, 0, 6),
        batch_size=5,
    ),
    Case(
        name="c03_one_table_on_two_shapes",
        situation="Word2vec reads one table with ids of shape [B] and [B, K], repeated ids included.",
        build=NegativeSampling,
        inputs=lambda: (
            torch.tensor([0, 3, 3, 8]),
            torch.tensor([1, 2, 2, 0]),
            torch.tensor([[1, 4, 4], [5, 2, 7], [2, 2, 2], [8, 1, 0]]),
        ),
    ),
    Case(
        name="c04_gpt_with_broadcast_positions",
        situation="Position ids of shape [1, T]: the broadcast belongs to the use, each sample has its own gradient.",
        build=TinyGPT,
        inputs=sentences,
        objective=lambda output: output.loss,
        batch_size=3,
    ),
    Case(
        name="c06_attention_with_batch_second",
        situation="The batch is dim 1 in attention, dim 0 in the mask and behind the pooling.",
        build=SequenceFirstAttention,
        inputs=attention_inputs,
        in_dims=(1, 1, 1, 0),
        objective=lambda output: output[0].sum(1),
    ),
    Case(
        name="c07_packed_lstm",
        situation="An LSTM on packed sequences of unequal, unsorted lengths: no batch axis inside, no padding.",
        build=PackedLSTM,
        inputs=lambda: (torch.randn(4, 5, 3), torch.tensor([2, 5, 1, 3])),
        objective=mean_square,
        targets=lambda: torch.randn(4, 1),
    ),
    Case(
        name="c08_two_task_gru",
        situation="Two mean losses on a shared recurrent trunk: two objectives, not one a sample.",
        build=TwoTaskGRU,
        inputs=lambda: (torch.randn(6, 5, 3),),
        in_dims=1,
        out_dim=None,
        objective=task_losses,
        targets=lambda: (torch.randn(5, 1), torch.randn(5, 2)),
        batch_size=5,
        coupled=True,
        claims=check_tasks,
    ),
    Case(
        name="c17_nested_mapping",
        situation="The batch is a nested mapping of ids, mask and numbers; the output a tuple inside a tuple.",
        build=MappingModel,
        inputs=mapping,
        objective=lambda output, targets: entropy(output[0][0], targets),
        targets=classes(2, 0, 1, 1),
    ),
    Case(
        name="c21_checkpointed_transformer",
        situation="Activation checkpointing changes memory, not values; the embedding is used for source and target.",
        build=CheckpointedTranslator,
        inputs=lambda: (torch.randint(0, 7, (3, 4)), torch.randint(0, 7, (3, 3))),
        batch_size=3,
    ),
    Case(
        name="x14_integer_batch_double_parameters",
        situation="The only input is integer: the Gramian has the dtype of the parameters; the counter ends at one.",
        build=lambda: CountingWords().double(),
        inputs=lambda: (torch.randint(0, 6, (4, 3)),),
        objective=entropy,
        targets=classes(0, 1, 1, 0),
        dtypes=(torch.float64,),
    ),
]
