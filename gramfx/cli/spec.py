"""``f32[B=8,3,32,32]`` and its like: the inputs of a model, described on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gramfx.errors import InputError

DTYPES = {
    **{"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16},
    **{"i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8},
    "b8": torch.bool,
}
EXPECTED = "dtype[sizes], as f32[8,3,32,32], i64[8,16]<1000, mask=b8[8,16] or f32[B=8,3]"
_SPEC = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dtype>\w+)\[(?P<sizes>[^\[\]]*)\](?:<(?P<bound>\d+))?")


@dataclass(frozen=True)
class Spec:
    """One input: its keyword or ``""``, dtype, sizes, the bound of its integers, and the dim that was written ``B``."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    bound: int
    batch_dim: int | None

    def tensor(self, generator: torch.Generator) -> Tensor:
        """Numbers from a normal distribution, or integers from 0 to below the bound."""
        if self.dtype.is_floating_point:
            return torch.randn(self.sizes, generator=generator).to(self.dtype)
        return torch.randint(self.bound, self.sizes, generator=generator).to(self.dtype)


@dataclass(frozen=True)
class Inputs:
    """Arguments for a step. ``symbolic``: whether a batch was written ``B``; ``in_dims``: its dims."""

    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]
    targets: tuple[Tensor, ...] | None
    in_dims: Any
    symbolic: bool

    def to(self, device: str) -> Inputs:
        """The same on a device."""
        return replace(
            self,
            args=tuple(one.to(device) for one in self.args),
            kwargs={name: one.to(device) for name, one in self.kwargs.items()},
            targets=self.targets and tuple(one.to(device) for one in self.targets),
        )


def read_inputs(inputs: Sequence[str], targets: Sequence[str], batch: int | None = None) -> Inputs:
    """Random tensors of these descriptions, the same at every call. batch: in place of what ``B`` was given.

    Raises :class:`InputError`.
    """
    texts = [*inputs, *targets]
    size = batch if batch is not None else _batch(texts)
    specs = [read_spec(text, size) for text in texts]
    symbolic = any(spec.batch_dim is not None for spec in specs)
    generator = torch.Generator().manual_seed(0)
    tensors = [spec.tensor(generator) for spec in specs]
    pairs = list(zip(specs, tensors, strict=True))
    asked, wanted = pairs[: len(inputs)], pairs[len(inputs) :]
    _check_keywords(asked, wanted, symbolic)
    dims = tuple(spec.batch_dim for spec, _ in asked if not spec.name)
    return Inputs(
        args=tuple(tensor for spec, tensor in asked if not spec.name),
        kwargs={spec.name: tensor for spec, tensor in asked if spec.name},
        targets=tuple(tensor for _, tensor in wanted) or None,
        in_dims=dims if symbolic else 0,
        symbolic=symbolic,
    )


def _check_keywords(
    asked: Sequence[tuple[Spec, Tensor]], wanted: Sequence[tuple[Spec, Tensor]], symbolic: bool
) -> None:
    for spec, tensor in [pair for pair in asked if pair[0].name] + list(wanted):
        if symbolic and spec.batch_dim != 0:
            raise InputError(
                "keyword inputs and targets hold the samples on their first dim",
                expected="B as the first size",
                got=str(tuple(tensor.shape)),
            )


def _batch(texts: Sequence[str]) -> int | None:
    """The size that ``B`` is given, in whichever description."""
    given = {int(found) for text in texts for found in re.findall(r"\bB\s*=\s*(\d+)", text)}
    if len(given) > 1:
        raise InputError("B has several sizes", expected="one", got=", ".join(map(str, sorted(given))))
    return given.pop() if given else None


def read_spec(text: str, batch: int | None = None) -> Spec:
    """One description. batch: the size of ``B``. Raises :class:`InputError`."""
    found = _SPEC.fullmatch(text.strip())
    if found is None or found["dtype"] not in DTYPES:
        dtypes = ", ".join(DTYPES)
        raise InputError("an input cannot be read", expected=f"{EXPECTED}; dtypes {dtypes}", got=text)
    words = [word.strip() for word in found["sizes"].split(",")] if found["sizes"].strip() else []
    sizes = tuple(_size(word, text, batch) for word in words)
    symbols = [dim for dim, word in enumerate(words) if word.startswith("B")]
    if len(symbols) > 1:
        raise InputError("an input has several batch dims", expected="B once", got=text)
    dtype, bound = DTYPES[found["dtype"]], int(found["bound"]) if found["bound"] else 2
    if found["bound"] and (dtype.is_floating_point or not bound):
        raise InputError("a bound is above 0, and of integers", expected="i64[8,16]<1000", got=text)
    return Spec(found["name"] or "", dtype, sizes, bound, symbols[0] if symbols else None)


def _size(word: str, text: str, batch: int | None) -> int:
    if re.fullmatch(r"B(\s*=\s*\d+)?", word):
        if batch is None:
            raise InputError("B has no size", expected="B=8 in one of the inputs", got=text)
        return batch
    if not word.isdigit():
        raise InputError("an input has a size that is no number", expected=EXPECTED, got=text)
    return int(word)
