"""Functions of nested tensors that torch cannot trace, or cannot differentiate, by ones that it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gramfx.torch_compat import JaggedParts, jagged, jagged_from, jagged_from_padded, jagged_known


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention within each sample: of padded tensors, keys behind a sample's end masked.

    For ``[samples, heads, rows, width]``; torch's own, on a CPU, goes through nested tensors of another layout, which
    no trace can follow.
    """
    parts = [jagged_known(tensor) for tensor in (query, key, value)]
    if any(one is None or one.dim != 2 for one in parts) or attn_mask is not None or dropout_p or enable_gqa:
        return NotImplemented
    _, keys, _ = parts
    assert keys is not None and parts[0] is not None
    padded = [torch.nested.to_padded_tensor(tensor.transpose(1, 2), 0.0) for tensor in (query, key, value)]
    q, k, v = (tensor.transpose(1, 2) for tensor in padded)
    lengths = keys.offsets.diff().unsqueeze(1)
    at = torch.arange(k.shape[2], device=lengths.device)
    # A sample without rows looks at padding: nothing reads what it sees, and an empty softmax would be NaN.
    seen = ((at < lengths) | (lengths == 0))[:, None, None, :]
    if is_causal:
        seen = seen & (at <= torch.arange(q.shape[2], device=at.device).unsqueeze(1))
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return jagged_from_padded(found.transpose(1, 2), parts[0]).transpose(1, 2)


def _summed(tensor: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """``sum`` along the ragged dim, or along others: torch has no derivative of it."""
    parts = jagged_known(tensor)
    if parts is None or dim is None or parts.dim != 1:
        return NotImplemented
    dims = sorted({one % tensor.dim() for one in (dim if isinstance(dim, (list, tuple)) else [dim])})
    if dims == [1]:
        padded = torch.nested.to_padded_tensor(tensor, 0.0)
        return padded.sum(1, keepdim=keepdim, dtype=dtype)
    if not dims or dims[0] < 2:
        return NotImplemented
    values = tensor.values().sum([one - 1 for one in dims], keepdim=keepdim, dtype=dtype)
    return jagged_from(JaggedParts(values, parts.offsets, 1, parts.shortest, parts.longest))


def _averaged(tensor: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """``mean`` along the ragged dim: torch has no derivative of it."""
    parts = jagged_known(tensor)
    if parts is None or dim not in (1, (1,), [1], 1 - tensor.dim()):
        return NotImplemented
    total = _summed(tensor, 1, keepdim, dtype=dtype)
    lengths = parts.offsets.diff()
    return total if total is NotImplemented else total / lengths.reshape(-1, *(1,) * (total.dim() - 1))


_DIFFERENTIABLE: dict[Any, Callable[..., Any]] = {
    torch.sum: _summed,
    Tensor.sum: _summed,
    torch.mean: _averaged,
    Tensor.mean: _averaged,
}


class Differentiable(TorchFunctionMode):
    """Runs a forward with reductions of nested tensors that have a derivative."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = NotImplemented
        if function in _DIFFERENTIABLE and args and jagged(args[0]):
            result = _DIFFERENTIABLE[function](*args, **kwargs)
        return function(*args, **kwargs) if result is NotImplemented else result
