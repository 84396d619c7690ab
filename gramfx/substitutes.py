"""Functions that torch captures wrongly, by functions that it captures right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gramfx import recurrent
from gramfx.distributed import wrappers_passed
from gramfx.nested import attention
from gramfx.torch_compat import flat_weights_kept, packing_replaced


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """``F.instance_norm`` that tracks statistics: its schema does not say that it changes them.

    As torch computes it: a batch norm of ``samples * channels`` channels, each with statistics of its own.
    """
    source, mean, variance = input, running_mean, running_var
    if mean is None or variance is None or not use_input_stats:
        return NotImplemented
    samples, channels = source.shape[:2]
    means, variances = mean.repeat(samples), variance.repeat(samples)
    flat = source.reshape(1, samples * channels, *source.shape[2:])
    normal = F.batch_norm(flat, means, variances, None, None, True, momentum, eps).reshape(source.shape)
    mean.copy_(means.reshape(samples, channels).mean(0))
    variance.copy_(variances.reshape(samples, channels).mean(0))
    shape = [channels] + [1] * (source.dim() - 2)
    normal = normal if weight is None else normal * weight.reshape(shape)
    return normal if bias is None else normal + bias.reshape(shape)


_SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    F.instance_norm: _instance_norm,
    F.scaled_dot_product_attention: attention,
}


class Substitutes(TorchFunctionMode):
    """Runs a forward with the functions of this module in place of torch's."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = _SUBSTITUTES[function](*args, **(kwargs or {})) if function in _SUBSTITUTES else NotImplemented
        return function(*args, **(kwargs or {})) if result is NotImplemented else result


@contextlib.contextmanager
def as_captured(program: nn.Module) -> Iterator[None]:
    """Around every capture: packed sequences stay padded, wrappers do nothing, and substitutes run."""
    packing = packing_replaced(recurrent.pack, recurrent.unpack, recurrent.run)
    with packing, flat_weights_kept(program), wrappers_passed(), Substitutes():
        yield
