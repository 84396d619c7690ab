"""Inputs of all strides and sizes, and what is kept where these change from call to call."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gramfx
from gramfx import kept
from gramfx.errors import RecaptureWarning
from tests import reference


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 2))
    return nn.Sequential(*layers).double()


def losses(output: Tensor) -> Tensor:
    return output.square().sum(1)


def assert_exact(step: gramfx.Step, model: nn.Module, source: Tensor) -> None:
    jacobian = reference.jacobian(losses(model(source)), reference.trainable(model))
    objectives, gramian = step(source)
    assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-12
    model.zero_grad()
    objectives.sum().backward()
    got = torch.cat([reference.flat(p.grad, p) for p in reference.trainable(model)])
    assert reference.relative_error(got, jacobian.sum(0)) <= 1e-12


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "every_second": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "expanded_channels": lambda x: x[:, :1].expand_as(x),
    "expanded_samples": lambda x: x[:1].expand_as(x),
    "flipped": lambda x: x.flip(0),
    "offset": lambda x: torch.cat([x[:1], x])[1:],
}


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])  # takes over 20 s in all
def test_strides_change_nothing(compile: bool) -> None:
    torch.manual_seed(1)
    model, source = net(), torch.randn(4, 2, 6, 6, dtype=torch.float64)
    step = gramfx.transform(model, losses, compile=compile)
    for layout in LAYOUTS.values():
        assert_exact(step, model, layout(source))
    assert step.captures == 1


def test_sizes_change_from_call_to_call() -> None:
    torch.manual_seed(1)
    model = net()
    step = gramfx.transform(model, losses, compile=False)
    for batch, size in ((1, 6), (3, 6), (5, 6), (5, 7), (2, 7), (0, 7), (1, 7), (4, 6)):
        assert_exact(step, model, torch.randn(batch, 2, size, size, dtype=torch.float64))


def test_no_more_is_kept_than_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_CAPTURES", 3)
    monkeypatch.setattr(kept, "MANY_CAPTURES", 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
    step = gramfx.transform(model, lambda out: out.sum((1, 2)), compile=False)
    sources = [torch.randn(4, length, 3, dtype=torch.float64) for length in range(2, 7)]
    step(sources[0])
    with pytest.warns(RecaptureWarning, match="pad inputs"):
        step(sources[1])
    first = step.plan
    for source in sources[2:]:
        step(sources[1])
        step(source)
    assert step.captures == 3
    step(sources[1])
    assert step.plan is first
