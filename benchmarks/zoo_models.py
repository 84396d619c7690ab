"""What an entry of the zoo is: a tiny model with random weights, its inputs, and a loss per sample."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import cross_entropy

BATCH = 3
#: How far parameters are moved at random, so that none starts where gradients vanish.
NOISE = 0.05
Settings = dict[str, Any]
Inputs = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class Entry:
    """One architecture: a model class made from a configuration class, both by name, of one library.

    Without ``config``, ``model`` is a function of the library that takes ``settings``. ``inputs`` makes the keyword
    arguments of a call; ``fields`` are those of the output that the objective reads, ``labels`` whether they are
    scores of classes. ``double``: whether the model makes tensors of torch's default dtype, which has to be float64
    then. ``mode``: ``"train"`` for a model that has no gradients otherwise.
    """

    name: str
    config: str
    settings: Settings
    model: str
    inputs: Inputs
    fields: tuple[str, ...] = ("logits",)
    labels: bool = True
    library: str = "transformers"
    double: bool = False
    mode: str = ""

    def build(self, mode: str) -> nn.Module:
        """The model with random weights in float64; without dropout in training."""
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64 if self.double else torch.float32)
        library: Any = importlib.import_module(self.library)
        given = (getattr(library, self.config)(**self.settings),) if self.config else ()
        model: nn.Module = getattr(library, self.model)(*given, **({} if given else self.settings))
        mode = self.mode or mode
        model = model.double().train(mode == "train")
        if mode == "train":
            silence(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=NOISE)
        return model

    def call(self) -> dict[str, Tensor]:
        """The keyword arguments of a call."""
        torch.manual_seed(1)
        return self.inputs()

    def objective(self, output: Any, *targets: Tensor) -> Tensor:
        """One loss a sample, over all fields that the output has."""
        loss = cross_entropy if self.labels else weighted
        losses = [loss(value, target) for value, target in zip(self.read(output), targets, strict=True)]
        return torch.stack(losses).sum(0)

    def read(self, output: Any) -> list[Tensor]:
        """The fields that the output has; all of it where it is a tensor."""
        if isinstance(output, Tensor):
            return [output]
        found = [getattr(output, name, None) for name in self.fields]
        return [value for value in found if value is not None]

    def targets(self, output: Any) -> tuple[Tensor, ...]:
        """Random labels, or random weights, for each field."""
        torch.manual_seed(2)
        shown = self.read(output)
        if self.labels:
            return tuple(torch.randint(value.shape[-1], value.shape[:-1]) for value in shown)
        return tuple(torch.randn(value.shape, dtype=torch.float64) for value in shown)


def silence(model: nn.Module) -> None:
    """No dropout, nor layers or entries left out at random."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if ("drop" in name and isinstance(value, float)) or (name == "p" and isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        for name in ("apply_spec_augment", "mask_time_prob", "mask_feature_prob", "layerdrop"):
            if hasattr(config, name):
                setattr(config, name, type(getattr(config, name))(0))


# ---------------------------------------------------------------- losses


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """The mean of the values times weights, over all dims but the first."""
    return (values * weights).flatten(1).mean(1)


# ---------------------------------------------------------------- inputs


def words(*tokens: int, **sizes: int) -> Inputs:
    """``input_ids``, of 8 tokens where nothing is given; or ids of other names with their numbers of tokens."""
    wanted = sizes if sizes and not tokens else {"input_ids": tokens[0] if tokens else 8, **sizes}
    return lambda: {name: torch.randint(3, 96, (BATCH, size)) for name, size in wanted.items()}


def pairs(source: int = 8, target: int = 6) -> Inputs:
    """Ids for an encoder and a decoder."""
    return words(source, decoder_input_ids=target)


def masks(tokens: int) -> Inputs:
    """An ``attention_mask`` that hides the last token of the last sample."""

    def made() -> dict[str, Tensor]:
        mask = torch.ones(BATCH, tokens, dtype=torch.int64)
        mask[-1, -1] = 0
        return {"attention_mask": mask}

    return made


def series(past: int = 10, future: int = 4) -> Inputs:
    """A time series with one feature of time, all of it observed."""

    def made() -> dict[str, Tensor]:
        found = normal(
            past_values=(past,), past_time_features=(past, 1), future_values=(future,), future_time_features=(future, 1)
        )()
        return {**found, "past_observed_mask": torch.ones(BATCH, past, dtype=torch.float64)}

    return made


def normal(**shapes: tuple[int, ...]) -> Inputs:
    """Random numbers by name, each of a shape without the batch."""
    return lambda: {name: torch.randn(BATCH, *shape, dtype=torch.float64) for name, shape in shapes.items()}


def images(size: int = 32, name: str = "pixel_values") -> Inputs:
    """Images of three channels."""
    return normal(**{name: (3, size, size)})


def joined(*inputs: Inputs) -> Inputs:
    """The arguments of all of them."""
    return lambda: {name: value for one in inputs for name, value in one().items()}


# ---------------------------------------------------------------- families

WORDS = words()
HIDDEN = ("last_hidden_state", "pooler_output")


def without(settings: Settings, *names: str) -> Settings:
    """The settings but for some."""
    return {name: value for name, value in settings.items() if name not in names}


def causal(name: str, stem: str, base: Settings, inputs: Inputs = WORDS, **more: Any) -> Entry:
    """A language model ``<stem>ForCausalLM``."""
    return Entry(name, f"{stem}Config", {**base, **more}, f"{stem}ForCausalLM", inputs)


def masked(name: str, stem: str, base: Settings, inputs: Inputs = WORDS, **more: Any) -> Entry:
    """An encoder with a head for words, ``<stem>ForMaskedLM``."""
    return Entry(name, f"{stem}Config", {**base, **more}, f"{stem}ForMaskedLM", inputs)


def headed(name: str, stem: str, head: str, base: Settings, inputs: Inputs, **more: Any) -> Entry:
    """A model whose output has ``logits``, ``<stem><head>``."""
    return Entry(name, f"{stem}Config", {**base, **more}, f"{stem}{head}", inputs)


def generating(name: str, stem: str, base: Settings, inputs: Inputs, **more: Any) -> Entry:
    """An encoder with a decoder of words, ``<stem>ForConditionalGeneration``."""
    return headed(name, stem, "ForConditionalGeneration", base, inputs, **more)


def features(
    name: str,
    stem: str,
    model: str,
    base: Settings,
    inputs: Inputs,
    fields: tuple[str, ...] = HIDDEN,
    **more: Any,
) -> Entry:
    """A model of which all features count."""
    return Entry(name, f"{stem}Config", {**base, **more}, f"{stem}{model}", inputs, fields, labels=False)


def classes(name: str, stem: str, base: Settings, size: int = 32, **more: Any) -> Entry:
    """A classifier of images, ``<stem>ForImageClassification``."""
    return headed(name, stem, "ForImageClassification", base, images(size), **more)
