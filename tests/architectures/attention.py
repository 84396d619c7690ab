"""Attention and Transformers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.architectures.formulas import per_sample_mean, plain, randn, wired


def attention(**options: Any) -> dict[str, nn.Module]:
    """One attention layer of width 6 with two heads."""
    return {"attention": nn.MultiheadAttention(6, 2, **options), "head": nn.Linear(6, 2)}


def attend_itself(m: Any, x: Tensor) -> Tensor:
    """Self-attention, batch first."""
    return m.head(m.attention(x, x, x, need_weights=False)[0].mean(1))


def attend_others(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to other inputs, sequence first."""
    return m.head(m.attention(q, k, v)[0].mean(0))


def attend_causally(m: Any, x: Tensor) -> Tensor:
    """Self-attention under a causal mask made of the input's length."""
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
    return m.head(m.attention(x, x, x, attn_mask=mask, need_weights=False)[0].tanh().sum(1))


def attend_padded(m: Any, x: Tensor, padding: Tensor) -> Tensor:
    """Self-attention that skips padding; the averaged weights are an output too."""
    h, weights = m.attention(x, x, x, key_padding_mask=padding)
    return m.head(h.mean(1)) + weights.square().sum((1, 2)).unsqueeze(1)


def padded_inputs() -> tuple[Tensor, Tensor]:
    """Tokens, and which of them are padding."""
    return torch.randn(4, 3, 6), torch.arange(3) >= torch.tensor([[3], [1], [2], [3]])


def layer(kind: type[nn.Module], **options: Any) -> nn.Module:
    """A Transformer layer without dropout."""
    return kind(6, 2, 8, dropout=0.0, batch_first=True, **options)


def transformer(width: int, heads: int, layers: int, hidden: int, **options: Any) -> nn.Module:
    """The published encoder-decoder, dropout off so that runs agree."""
    layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, **options)
    encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
    return nn.Transformer(
        width, heads, num_decoder_layers=layers, dim_feedforward=hidden, dropout=0.0, custom_encoder=encoder, **options
    )


def through_checkpoint(m: Any, source: Tensor, target: Tensor) -> Tensor:
    """The whole Transformer recomputed in the backward pass."""
    return checkpoint(m.core, source, target, use_reentrant=False).square().mean((1, 2))


def decoder_only(m: Any, x: Tensor, memory: Tensor) -> Tensor:
    """One decoder layer with a causal mask."""
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
    return m.layer(x, memory, tgt_mask=mask, tgt_is_causal=True).square().mean((1, 2))


TOKENS, PAIR = randn((4, 3, 6)), randn((4, 3, 6), (4, 2, 6))

ATTENTION = [
    wired("attention_self", lambda: attention(batch_first=True), attend_itself, TOKENS),
    wired(
        "attention_kdim_vdim",
        lambda: attention(kdim=4, vdim=5),
        attend_others,
        randn((3, 4, 6), (2, 4, 4), (2, 4, 5)),
        in_dims=1,
    ),
    wired(
        "attention_extra_key_and_zero",
        lambda: attention(add_bias_kv=True, add_zero_attn=True, batch_first=True),
        attend_itself,
        TOKENS,
    ),
    wired("attention_without_bias", lambda: attention(bias=False, batch_first=True), attend_itself, TOKENS),
    wired("attention_causal", lambda: attention(batch_first=True), attend_causally, TOKENS),
    wired("attention_padded", lambda: attention(batch_first=True), attend_padded, padded_inputs),
    plain("encoder_layer", lambda: layer(nn.TransformerEncoderLayer), TOKENS, objective=per_sample_mean),
    plain(
        "encoder_layer_norm_first_gelu",
        lambda: layer(nn.TransformerEncoderLayer, norm_first=True, activation="gelu"),
        TOKENS,
        objective=per_sample_mean,
    ),
    plain("encoder_layer_eval", lambda: layer(nn.TransformerEncoderLayer).eval(), TOKENS, objective=per_sample_mean),
    plain(
        "encoder_dropout",
        lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True),
        TOKENS,
        objective=per_sample_mean,
        random=True,
    ),
    wired("decoder_layer_causal", lambda: {"layer": layer(nn.TransformerDecoderLayer)}, decoder_only, PAIR),
    plain("transformer_small", lambda: transformer(6, 2, 1, 8, batch_first=True), PAIR, objective=per_sample_mean),
    plain(
        "transformer_sequence_first",
        lambda: transformer(6, 2, 1, 8),
        randn((3, 4, 6), (2, 4, 6)),
        in_dims=1,
        objective=lambda o: o.square().mean((0, 2)),
    ),
    wired(
        "transformer_checkpointed",
        lambda: {"core": transformer(6, 2, 1, 8, batch_first=True)},
        through_checkpoint,
        PAIR,
    ),
    plain(
        "transformer_large",
        lambda: transformer(512, 8, 6, 2048, batch_first=True),
        randn((8, 10, 512), (8, 20, 512)),
        objective=per_sample_mean,
        batch_size=8,
        slow=True,
    ),
]
