"""With the packages that people train with: TorchJD, Lightning, torch's own optimisers, scaling and checkpoints."""

import copy
import dataclasses
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
import torchjd.aggregation as torchjd
from torch import Tensor, nn
from torchjd.autogram import Engine

import gramfx
from tests import reference

WEIGHTINGS: dict[str, Callable[[], Any]] = {
    "UPGrad": torchjd.UPGradWeighting,
    "MGDA": torchjd.MGDAWeighting,
    "PCGrad": torchjd.PCGradWeighting,
    "AlignedMTL": torchjd.AlignedMTLWeighting,
    "IMTLG": torchjd.IMTLGWeighting,
    "DualProj": torchjd.DualProjWeighting,
    "Krum": lambda: torchjd.KrumWeighting(n_byzantine=1, n_selected=2),
    "GradVac": torchjd.GradVacWeighting,
    "Mean": torchjd.MeanWeighting,
    "Sum": torchjd.SumWeighting,
    "Random": torchjd.RandomWeighting,
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 4)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, dtype=torch.float64, generator=generator), torch.arange(8) % 4


def losses_of(model: Callable[[Tensor], Tensor]) -> Tensor:
    inputs, targets = data()
    return F.cross_entropy(model(inputs), targets, reduction="none")


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_weightings_give_the_same_from_our_gramian(name: str) -> None:
    theirs_model, ours_model = net(), net()
    engine = Engine(theirs_model, batch_dim=0)
    theirs = engine.compute_gramian(losses_of(theirs_model))
    _, transformed = gramfx.transform(ours_model, nn.CrossEntropyLoss(reduction="none"), compile=False)(
        data()[0], targets=data()[1]
    )
    ours = gramfx.Engine(ours_model, batch_dim=0, compile=False).compute_gramian(losses_of(ours_model))
    found = []
    for gramian in (theirs, ours, transformed):
        torch.manual_seed(3)
        found.append(WEIGHTINGS[name]()(gramian))
    assert reference.relative_error(found[1], found[0]) <= 1e-6
    assert reference.relative_error(found[2], found[0]) <= 1e-6


def train(engine_of: Callable[[nn.Module], Any], steps: int = 10) -> list[float]:
    model = net()
    engine, weighting = engine_of(model), torchjd.UPGradWeighting()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
    curve = []
    for _ in range(steps):
        losses = losses_of(model)
        weights = weighting(engine.compute_gramian(losses))
        optimiser.zero_grad()
        losses.backward(weights)
        optimiser.step()
        curve.append(float(losses.detach().mean()))
    return curve


def test_training_is_the_same_with_either_engine() -> None:
    theirs = train(lambda model: Engine(model, batch_dim=0))
    ours = train(lambda model: gramfx.Engine(model, batch_dim=0, compile=False))
    assert ours[-1] < ours[0]
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1e-6


class Lit(lightning.LightningModule):
    """Jacobian descent as a Lightning module, by hand-written optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = net()
        self.step = gramfx.transform(self.model, nn.CrossEntropyLoss(reduction="none"), compile=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.2)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimiser: Any = self.optimizers()
        losses, gramian = self.step(batch[0], targets=batch[1])
        optimiser.zero_grad()
        self.manual_backward(losses, gradient=torchjd.UPGradWeighting()(gramian))
        optimiser.step()


def test_a_lightning_module_trains_as_the_loop_does(tmp_path: Any) -> None:
    module = Lit()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=8)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's hints about workers and loggers
        trainer = lightning.Trainer(
            max_epochs=3, accelerator="cpu", default_root_dir=tmp_path, enable_model_summary=False, **options
        )
        trainer.fit(module, loader)
    plain = net()
    optimiser, weighting = torch.optim.SGD(plain.parameters(), lr=0.2), torchjd.UPGradWeighting()
    for _ in range(3):
        losses = losses_of(plain)
        optimiser.zero_grad()
        losses.backward(weighting(reference.gramian(losses, list(plain.parameters()))))
        optimiser.step()
    for mine, their in zip(module.model.parameters(), plain.parameters(), strict=True):
        assert reference.relative_error(mine, their) <= 1e-8


OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "clipped": lambda p: torch.optim.SGD(p, lr=0.1),
}


@pytest.mark.parametrize("gradient", ["kept", "replayed"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_twenty_optimiser_steps_equal_plain_training(name: str, gradient: str) -> None:
    ours, plain = net(), net()
    step = steps_with(ours, gradient)
    optimisers = [OPTIMISERS[name](list(model.parameters())) for model in (ours, plain)]
    weights = torch.linspace(0.5, 1.5, 8, dtype=torch.float64)
    for _ in range(20):
        for model, losses, optimiser in zip(
            (ours, plain), (step(data()[0], targets=data()[1])[0], losses_of(plain)), optimisers, strict=True
        ):
            optimiser.zero_grad()
            (weights * losses).sum().backward()
            if name == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimiser.step()
    for mine, their in zip(ours.parameters(), plain.parameters(), strict=True):
        assert reference.relative_error(mine, their) <= 1e-10


def steps_with(model: nn.Module, gradient: str) -> gramfx.Step:
    """A step whose gradient is had in one way."""
    objective = nn.CrossEntropyLoss(reduction="none")
    step = gramfx.transform(model, objective, compile=False).capture(data()[0], targets=data()[1])
    assert step.plan.gradient == "kept"
    changed: dict[str, Any] = {"gradient": gradient}
    plan = dataclasses.replace(step.plan, **changed)
    made = gramfx.transform(model, objective, compile=False, plan=plan).capture(data()[0], targets=data()[1])
    assert made.plan.gradient == gradient
    return made


def test_checkpoints_in_the_middle_of_training() -> None:
    model = net()
    step = gramfx.transform(model, nn.CrossEntropyLoss(reduction="none"), compile=False)
    optimiser = torch.optim.Adam(step.parameters(), lr=0.01)

    def go(count: int) -> None:
        for _ in range(count):
            losses, gramian = step(data()[0], targets=data()[1])
            optimiser.zero_grad()
            losses.backward(torchjd.MeanWeighting()(gramian))
            optimiser.step()

    go(3)
    held = io.BytesIO()
    torch.save({"model": step.state_dict(), "optimiser": optimiser.state_dict()}, held)
    go(3)
    wanted = copy.deepcopy(model.state_dict())
    held.seek(0)
    saved = torch.load(held)
    step.load_state_dict(saved["model"])
    optimiser.load_state_dict(saved["optimiser"])
    go(3)
    assert all(torch.equal(wanted[name], tensor) for name, tensor in model.state_dict().items())


def test_autocast_and_scaling() -> None:
    ours, plain = net().float(), net().float()
    inputs, targets = data()[0].float(), data()[1]
    step = gramfx.transform(ours, nn.CrossEntropyLoss(reduction="none"), compile=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimisers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, plain)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses, gramian = step(inputs, targets=targets)
        plain_losses = F.cross_entropy(plain(inputs), targets, reduction="none")
    assert gramian.dtype == torch.float32
    jacobian = reference.jacobian(plain_losses, list(plain.parameters()))
    assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 2e-2
    scaler.scale(losses.sum()).backward()
    scaler.step(optimisers[0])
    scaler.update()
    plain_losses.sum().backward()
    optimisers[1].step()
    for mine, their in zip(ours.parameters(), plain.parameters(), strict=True):
        assert reference.relative_error(mine, their) <= 2e-2
