"""``gramfx.Engine``: the same calls, shapes, order and dtype as the engine that people have."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramfx
from gramfx.errors import CoupledObjectivesError, DenseJacobianWarning, InputError
from tests import reference


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Trunk(nn.Module):
    """Two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 2), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """``[b, 2]`` and ``[b, 1]``."""
        hidden = self.trunk(inputs).tanh()
        return self.first(hidden), self.second(hidden)


def twins(make: Any = Trunk) -> tuple[Any, Any, Tensor]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make().double())
    return made[0], made[1], torch.randn(5, 3, dtype=torch.float64)


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))


def exact(gramian: Tensor, objectives: Tensor, *modules: nn.Module) -> None:
    assert reference.relative_error(gramian, reference.gramian(objectives, reference.trainable(*modules))) <= 1e-10


@pytest.mark.parametrize("batch_dim", [None, 0])
def test_one_output_of_any_shape(batch_dim: int | None) -> None:
    ours, other, inputs = twins(sequential)
    engine = gramfx.Engine(ours, batch_dim=batch_dim, compile=False)
    output = ours(inputs)
    gramian = engine.compute_gramian(output)
    assert gramian.shape == (10, 10)
    assert gramian.dtype == output.dtype
    assert not gramian.requires_grad
    exact(gramian, other(inputs), other)
    weights = torch.linspace(0, 1, 10, dtype=torch.float64).reshape(5, 2)
    output.backward(weights)
    other(inputs).backward(weights)
    for mine, their in zip(ours.parameters(), other.parameters(), strict=True):
        assert reference.relative_error(reference.flat(mine.grad, mine), reference.flat(their.grad, their)) <= 1e-12


def test_several_outputs_and_several_calls_a_forward() -> None:
    ours, other, inputs = twins()
    engine = gramfx.Engine(ours, compile=False)
    first, second = ours(inputs)
    plain = other(inputs)
    exact(engine.compute_gramian(first), plain[0], other)
    exact(engine.compute_gramian(second.squeeze(1)), plain[1], other)
    exact(engine.compute_gramian([first, second]), torch.cat([plain[0].reshape(-1), plain[1].reshape(-1)]), other)
    first.sum().backward()


def test_coupled_objectives_are_an_error_with_a_batch_dim() -> None:
    ours, other, inputs = twins(sequential)
    centred = ours(inputs)[:, 0] - ours(inputs)[:, 0].mean()
    assert centred.shape == (5,)
    engine = gramfx.Engine(ours, batch_dim=0, compile=False)
    output = ours(inputs)[:, 0]
    with pytest.raises(CoupledObjectivesError):
        engine.compute_gramian(output - output.mean())
    loose = gramfx.Engine(other, compile=False)
    output = other(inputs)[:, 0]
    twin = twins(sequential)[1]
    exact(loose.compute_gramian(output - output.mean()), twin(inputs)[:, 0] - twin(inputs)[:, 0].mean(), twin)


def test_coupling_inside_a_module_is_an_error_with_a_batch_dim() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    engine = gramfx.Engine(model, batch_dim=0, compile=False)
    output = model(torch.randn(5, 3, dtype=torch.float64)).square().sum(1)
    for _ in range(2):
        with pytest.raises(CoupledObjectivesError, match="mixes along the batch"):
            engine.compute_gramian(output)


def test_some_of_a_models_modules() -> None:
    ours, other, inputs = twins()
    engine = gramfx.Engine(ours.trunk, ours.second, compile=False)
    gramian = engine.compute_gramian(ours(inputs)[1].squeeze(1))
    exact(gramian, other(inputs)[1].squeeze(1), other.trunk, other.second)
    # No part of an output that does not depend on them.
    assert not gramfx.Engine(ours.first, compile=False).compute_gramian(ours(inputs)[1]).any()


def test_a_module_inside_another_is_counted_once() -> None:
    ours, other, inputs = twins()
    engine = gramfx.Engine(ours, ours.trunk, compile=False)
    exact(engine.compute_gramian(ours(inputs)[0]), other(inputs)[0], other)


def test_modules_compiled_before() -> None:
    ours, other, inputs = twins(sequential)
    run: Any = torch.compile(ours, backend="aot_eager")
    run(inputs)
    engine = gramfx.Engine(run, compile=False)
    exact(engine.compute_gramian(run(inputs)), other(inputs), other)


def test_modules_compiled_after() -> None:
    ours, other, inputs = twins(sequential)
    engine = gramfx.Engine(ours, compile=False)
    output = torch.compile(ours, backend="aot_eager")(inputs)
    # An outer compilation takes the module's code, not its calls.
    with pytest.warns(DenseJacobianWarning):
        gramian = engine.compute_gramian(output)
    exact(gramian, other(inputs), other)


def test_only_modules_make_an_engine() -> None:
    with pytest.raises(InputError, match="made of modules"):
        gramfx.Engine(lambda x: x)  # type: ignore[arg-type]
