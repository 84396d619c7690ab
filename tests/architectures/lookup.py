"""Tables read by ids."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.architectures.formulas import formula, ids, per_sample_mean, plain, randn, wired

TABLE = {"table": (6, 3)}
ONE, MANY = ids(6, (4,)), ids(6, (4, 5))


class TiedLanguageModel(nn.Module):
    """The embedding's table is the head's weight, with positions read by ids of batch one."""

    def __init__(self, tokens: bool) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(6, 4), nn.Embedding(5, 4)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 6)
        self.head.weight = self.embedding.weight
        self.tokens = tokens

    def forward(self, words: Tensor) -> Tensor:
        h = self.embedding(words)
        if self.tokens:
            h = h + self.position(torch.arange(words.shape[1], device=words.device)[None])
        return self.head(torch.tanh(self.body(h)))


class RelativeBias(nn.Module):
    """Adds a table indexed by the distance of two positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        bias = self.table(place[:, None] - place[None, :] + 4).permute(2, 0, 1)
        scores = (x @ x.transpose(1, 2)).unsqueeze(1) + bias
        return (scores.softmax(-1) * scores).sum((2, 3))


def next_word(logits: Tensor, words: Tensor) -> Tensor:
    """Objectives [B]: mean cross-entropy of the words that are not padding."""
    losses = F.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="none").view_as(words)
    return losses.mean(1)


def skip_gram(m: Any, word: Tensor, other: Tensor) -> Tensor:
    """One table on [B] and on [B, K]."""
    return (m.a(word).unsqueeze(1) * m.b(other)).sum(2) + m.b(word).sum(1, keepdim=True)


def bag_inputs() -> tuple[Tensor, Tensor]:
    """All bags in one line, and where each begins."""
    return torch.randint(0, 6, (9,)), torch.tensor([0, 2, 2, 5])


LOOKUP = [
    plain("embedding", lambda: nn.Embedding(6, 3), ONE),
    plain(
        "embedding_tokens",
        lambda: nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 2), nn.Tanh()),
        MANY,
        objective=per_sample_mean,
    ),
    plain(
        "embedding_of_images",
        lambda: nn.Sequential(nn.Embedding(6, 3), nn.Tanh()),
        ids(6, (3, 2, 4)),
        objective=per_sample_mean,
        batch_size=3,
    ),
    plain(
        "embedding_padding_idx",
        lambda: nn.Sequential(nn.Embedding(6, 3, padding_idx=2), nn.Tanh()),
        MANY,
        objective=per_sample_mean,
    ),
    plain(
        "embedding_sparse_gradient",
        lambda: nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Tanh()),
        MANY,
        objective=per_sample_mean,
    ),
    plain(
        "embedding_one_row",
        lambda: nn.Sequential(nn.Embedding(1, 3), nn.Tanh()),
        ids(1, (4, 5)),
        objective=per_sample_mean,
    ),
    plain(
        "embedding_large_vocabulary",
        lambda: nn.Sequential(nn.Embedding(900, 2), nn.Tanh()),
        ids(900, (4, 6)),
        objective=per_sample_mean,
    ),
    wired(
        "embedding_on_two_shapes",
        lambda: {"a": nn.Embedding(6, 3), "b": nn.Embedding(6, 3)},
        skip_gram,
        ids(6, (4,), (4, 3)),
    ),
    plain("embedding_bag_sum", lambda: nn.EmbeddingBag(6, 3, mode="sum"), MANY),
    plain("embedding_bag_mean", lambda: nn.EmbeddingBag(6, 3, mode="mean"), MANY),
    plain("embedding_bag_padding_idx", lambda: nn.EmbeddingBag(6, 3, mode="mean", padding_idx=1), MANY),
    plain(
        "embedding_bag_offsets",
        lambda: nn.EmbeddingBag(6, 3, mode="sum"),
        bag_inputs,
        in_dims=(None, 0),
        alone=False,
        unproven=True,
    ),
    wired(
        "embedding_bag_weighted",
        lambda: {"bag": nn.EmbeddingBag(6, 3, mode="sum")},
        lambda m, i, w: m.bag(i, per_sample_weights=w),
        lambda: (torch.randint(0, 6, (4, 5)), torch.rand(4, 5)),
    ),
    formula("f_embedding", TABLE, lambda p, i: F.embedding(i, p.table).tanh().sum(1), MANY),
    formula(
        "f_embedding_on_computed_table",
        {"a": (6, 2), "b": (2, 3)},
        lambda p, i: F.embedding(i, torch.tanh(p.a @ p.b)).square().sum(1),
        MANY,
    ),
    formula("f_embedding_on_slice", {"table": (8, 3)}, lambda p, i: F.embedding(i, p.table[2:]).square().sum(1), MANY),
    formula("indexing", TABLE, lambda p, i: p.table[i].tanh(), ONE),
    formula("indexing_tokens", TABLE, lambda p, i: p.table[i].tanh().sum(1), MANY),
    formula("indexing_second_dim", {"table": (3, 6)}, lambda p, i: p.table[:, i].tanh().sum((0, 2)), MANY, alone=True),
    formula(
        "indexing_two_dims", {"table": (6, 6, 2)}, lambda p, i, j: p.table[i, j].tanh().sum(1), ids(6, (4, 5), (4, 5))
    ),
    formula("indexing_scalar_table", {"table": (6,)}, lambda p, i: p.table[i].tanh().sum(1), MANY),
    formula("index_select", TABLE, lambda p, i: torch.index_select(p.table, 0, i).tanh(), ONE),
    formula("gather", {"table": (6, 3)}, lambda p, i: p.table.gather(0, i).tanh(), ids(6, (4, 3))),
    formula(
        "gather_expanded",
        TABLE,
        lambda p, i: p.table.expand(i.shape[0], 6, 3).gather(1, i[:, :, None].expand(-1, -1, 3)).tanh().sum(1),
        MANY,
    ),
    formula("take", TABLE, lambda p, i: torch.take(p.table, i).tanh().sum(1), MANY),
    formula("one_hot_product", TABLE, lambda p, i: (F.one_hot(i, 6).to(p.table.dtype) @ p.table).tanh().sum(1), MANY),
    formula("boolean_choice", {"a": (3,), "b": (3,)}, lambda p, x: torch.where(x > 0, p.a, p.b) * x, randn((4, 3))),
    formula(
        "constant_indices",
        {"table": (6,)},
        lambda p, x: torch.tanh(x * p.table[torch.tensor([0, 3, 3], device=x.device)]),
        randn((4, 3)),
    ),
    plain(
        "tied_embedding_and_head",
        lambda: TiedLanguageModel(tokens=False),
        ONE,
        objective=lambda o, y: F.cross_entropy(o, y, reduction="none"),
        targets=lambda: torch.tensor([0, 2, 5, 2]),
    ),
    plain(
        "tied_embedding_and_head_tokens",
        lambda: TiedLanguageModel(tokens=True),
        MANY,
        objective=next_word,
        targets=lambda: torch.randint(0, 6, (4, 5)),
    ),
    plain("tied_embedding_and_head_logits", lambda: TiedLanguageModel(tokens=False), ids(6, (3,)), batch_size=3),
    plain("relative_position_bias", RelativeBias, randn((4, 5, 3))),
    wired(
        "position_ids_of_batch_one",
        lambda: {"p": nn.Embedding(5, 3)},
        lambda m, x: torch.tanh(x + m.p(torch.arange(5, device=x.device)[None])).sum(1),
        randn((4, 5, 3)),
    ),
    wired(
        "position_ids_expanded",
        lambda: {"p": nn.Embedding(5, 3)},
        lambda m, x: torch.tanh(x + m.p(torch.arange(5, device=x.device)[None]).expand_as(x)).sum(1),
        randn((4, 5, 3)),
    ),
]
