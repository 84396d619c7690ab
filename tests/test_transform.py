"""The public interface as a user meets it."""

import collections
import copy
import dataclasses
import functools
import operator
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramfx
from gramfx.attributes import plain_state
from gramfx.emit import gramian_of
from gramfx.errors import CoupledObjectivesWarning, StaticBatchWarning
from gramfx.kept import Families
from tests import reference


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(count: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 3, generator=generator, dtype=torch.float64), torch.arange(count) % 2


def losses(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, reduction="none")


def wanted(objectives: Tensor, *modules: nn.Module, extra: tuple[Tensor, ...] = ()) -> Tensor:
    return reference.gramian(objectives, [*reference.trainable(*modules), *extra])


def test_optimiser_steps_are_seen_and_equal_plain_training() -> None:
    ours, plain = net(), net()
    step = gramfx.transform(ours, losses, compile=False)
    optimisers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, plain)]
    x, y = batch()
    weights = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    for _ in range(3):
        objectives, gramian = step(x, targets=y)
        plain_losses = losses(plain(x), y)
        assert reference.relative_error(gramian, wanted(plain_losses, plain)) <= 1e-10
        for optimiser, value in zip(optimisers, (objectives, plain_losses), strict=True):
            optimiser.zero_grad()
            (value * weights).sum().backward()
            optimiser.step()
    assert step.captures == 1
    for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert reference.relative_error(mine, other) <= 1e-12


def test_gradients_accumulate_and_graphs_can_be_kept() -> None:
    model = net()
    objectives, _ = gramfx.transform(model, losses, compile=False)(batch()[0], targets=batch()[1])
    jacobian = reference.jacobian(losses(model(batch()[0]), batch()[1]), reference.trainable(model))
    objectives.sum().backward(retain_graph=True)
    objectives[1].backward()
    got = torch.cat([reference.flat(p.grad, p) for p in reference.trainable(model)])
    assert reference.relative_error(got, jacobian.sum(0) + jacobian[1]) <= 1e-12


def test_gradients_of_inputs_that_ask_for_them() -> None:
    model, (inputs, targets) = net(), batch()
    step = gramfx.transform(model, losses, compile=False)
    ours, plain = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    step(ours * 2, targets=targets)[0].sum().backward()
    assert step.plan.gradient == "replayed"
    losses(model(plain * 2), targets).sum().backward()
    assert ours.grad is not None
    assert plain.grad is not None
    assert reference.relative_error(ours.grad, plain.grad) <= 1e-12


def test_a_gradient_is_replayed_where_keeping_it_costs_too_much() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).double(), torch.randn(512, 64).double()
    roomy = gramfx.transform(model, compile=False, in_dims=0, objective=lambda output: output.square().sum(1))
    tight = gramfx.transform(
        model, compile=False, objective=lambda output: output.square().sum(1), memory_budget=roomy(inputs)[1].nbytes * 4
    )
    assert roomy.plan.gradient == "kept"
    assert roomy.plan.saved > 0
    weights = torch.linspace(0, 1, 512).double()
    found = []
    for step in (roomy, tight):
        model.zero_grad()
        step(inputs)[0].backward(weights)
        found.append(torch.cat([reference.flat(p.grad, p) for p in model.parameters()]))
    assert tight.plan.gradient == "replayed"
    assert tight.plan.saved == 0
    assert reference.relative_error(found[0], found[1]) <= 1e-12


def test_a_plan_that_kept_more_than_there_is_room_for_is_replayed() -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).double(), torch.randn(512, 64).double()

    def objective(output: Tensor) -> Tensor:
        return output.square().sum(1)

    plan = gramfx.transform(model, objective, compile=False).capture(inputs).plan
    assert plan.gradient == "kept"
    # Room for the step, not for what it would keep.
    tight = gramfx.transform(model, objective, compile=False, plan=plan, memory_budget=8 * 2**20)
    tight(inputs)[0].sum().backward()
    assert tight.plan.gradient == "replayed"
    wanted = torch.autograd.grad(objective(model(inputs)).sum(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert reference.relative_error(reference.flat(parameter.grad, parameter), gradient.flatten()) <= 1e-12


def test_what_is_kept_is_freed_by_the_backward() -> None:
    model = net()
    objectives, _ = gramfx.transform(model, losses, compile=False)(batch()[0], targets=batch()[1])
    node: Any = objectives.grad_fn
    assert node.own
    objectives.sum().backward(retain_graph=True)
    assert node.own
    objectives.sum().backward()
    assert not node.own
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        objectives.sum().backward()


def test_a_parameter_changed_before_backward_is_an_error() -> None:
    model = net()
    objectives, _ = gramfx.transform(model, losses, compile=False)(batch()[0], targets=batch()[1])
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        objectives.sum().backward()


def test_modes_and_flags_act_on_the_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    step, x = gramfx.transform(model, compile=False), batch()[0]
    trained = step(x)[0]
    model.eval()
    objectives, gramian = step(x)
    assert reference.relative_error(objectives, model(x)) <= 1e-12 < reference.relative_error(trained, model(x))
    model[0].weight.requires_grad_(False)
    assert reference.relative_error(step(x)[1], wanted(model(x), model)) <= 1e-10
    assert reference.relative_error(gramian, wanted(model(x), model)) > 1e-3
    model.float()
    assert step(x.float())[1].dtype == torch.float32


def test_callables_over_modules_and_closed_over_parameters() -> None:
    first, second = net(), nn.Linear(2, 2).double()
    free = nn.Parameter(torch.ones(2, dtype=torch.float64))
    x = batch()[0]

    def both(inputs: Tensor) -> Tensor:
        return second(first(inputs)) * free

    _, gramian = gramfx.transform(both, compile=False)(x)
    assert reference.relative_error(gramian, wanted(both(x), first, second, extra=(free,))) <= 1e-10
    scaled = functools.partial(lambda model, inputs: model(inputs) * 2, first)
    assert reference.relative_error(gramfx.transform(scaled, compile=False)(x)[1], wanted(scaled(x), first)) <= 1e-10


def test_an_objective_may_learn_and_its_constants_may_change() -> None:
    model, x, scales = net(), batch()[0], [2.0]
    head = nn.Linear(2, 1).double()
    step = gramfx.transform(model, lambda output: head(output) * scales[0], compile=False)
    for scale in (2.0, 3.0):
        scales[0] = scale
        assert reference.relative_error(step(x)[1], wanted(head(model(x)) * scale, model, head)) <= 1e-10


@dataclasses.dataclass
class Batch:
    """A dataclass that torch's pytrees do not know."""

    x: Tensor
    scale: float


class Encoding(collections.UserDict[str, Any]):
    """A mapping that torch's pytrees do not know."""


def test_arguments_of_any_container() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, batch: Batch, encoding: Encoding, *, names: tuple[str, ...]) -> dict[str, Tensor]:
            return {names[0]: self.inner(batch.x * batch.scale + encoding["x"])}

    model, x = Reads(), batch()[0]
    args = (Batch(x, 2.0), Encoding(x=x))
    step = gramfx.transform(model, lambda output: output["y"], compile=False)
    _, gramian = step(*args, names=("y",))
    assert reference.relative_error(gramian, wanted(model(*args, names=("y",))["y"], model)) <= 1e-10
    args[0].scale = 3.0
    _, gramian = step(*args, names=("y",))
    assert reference.relative_error(gramian, wanted(model(*args, names=("y",))["y"], model)) <= 1e-10
    assert isinstance(args[1]["x"], Tensor) and args[1]["x"] is x


def test_a_second_batch_size_makes_the_batch_symbolic() -> None:
    model = net()
    step = gramfx.transform(model, losses, compile=False)
    for count in (4, 6, 9, 4, 12, 1, 6):
        x, y = batch(count)
        _, gramian = step(x, targets=y)
        assert gramian.shape == (count, count)
        assert reference.relative_error(gramian, wanted(losses(model(x), y), model)) <= 1e-10
    assert step.captures == 3


def test_a_batch_that_cannot_be_symbolic_is_said_so() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).double()
    step = gramfx.transform(model, dynamic=True, compile=False)
    with pytest.warns(StaticBatchWarning, match="coupled"), pytest.warns(gramfx.errors.CoupledObjectivesWarning):
        _, gramian = step(batch()[0])
    assert reference.relative_error(gramian, wanted(model(batch()[0]), model)) <= 1e-10


def test_an_empty_batch() -> None:
    model = net()
    objectives, gramian = gramfx.transform(model, losses, compile=False)(*[batch(0)[0]], targets=batch(0)[1])
    assert objectives.shape == (0,) and gramian.shape == (0, 0)
    objectives.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_under_no_grad_and_with_inputs_that_require_grad() -> None:
    model, x = net(), batch()[0].requires_grad_()
    step = gramfx.transform(model, compile=False)
    with torch.no_grad():
        objectives, gramian = step(x)
    assert not objectives.requires_grad
    assert reference.relative_error(gramian, wanted(model(x), model)) <= 1e-10


def test_buffers_advance_once_a_call() -> None:
    ours, plain = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double() for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    step = gramfx.transform(ours, in_dims=None, compile=False)
    for count in (4, 5, 4):
        step(batch(count)[0])
        plain(batch(count)[0])
    for name, buffer in plain.named_buffers():
        assert reference.relative_error(dict(ours.named_buffers())[name].double(), buffer.double()) <= 1e-12


def test_stages_can_be_printed_and_the_lowered_graph_run(capsys: pytest.CaptureFixture[str]) -> None:
    model, (x, y) = net(), batch()
    step = gramfx.transform(model, losses, compile=False).capture(x, targets=y)
    for name in gramfx.STAGES:
        step.stage(name).print()
        assert capsys.readouterr().out == str(step.stage(name)) + "\n"
    lowered = step.stage("lowered").graph_module
    objectives, gramian = lowered(*step.arguments(x, targets=y))[:2]
    assert reference.relative_error(objectives, losses(model(x), y)) <= 1e-12
    assert reference.relative_error(gramian, wanted(losses(model(x), y), model)) <= 1e-10
    assert "f64[B, 4]" in str(step.stage("batched")) and "[" in str(step.stage("planned"))


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_around_the_call_is_that_of_the_plain_forward(inside: bool) -> None:
    model, (x, y) = net().float(), batch()
    x = x.float()
    step = gramfx.transform(model, lambda output, targets: losses(output.float(), targets), compile=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        objectives, gramian = step(x, targets=y)
        want = losses(model(x).float(), y)
        if inside:
            objectives.sum().backward()
    if not inside:
        objectives.sum().backward()
    assert gramian.dtype == torch.float32
    assert reference.relative_error(objectives, want) <= 1e-6
    assert reference.relative_error(gramian, wanted(want, model)) <= 3e-2
    got = torch.cat([reference.flat(p.grad, p) for p in reference.trainable(model)])
    summed = reference.weighted_gradient(want, reference.trainable(model), torch.ones(len(y)))
    assert reference.relative_error(got, summed) <= 3e-2
    plain = step(x, targets=y)[1]
    assert reference.relative_error(plain, gramian) > 1e-5


def test_a_step_is_a_module_around_the_model() -> None:
    model, x = net(), batch()[0]
    step = gramfx.transform(model, compile=False)
    assert list(step.parameters()) == list(model.parameters())
    assert step.state_dict().keys() == model.state_dict().keys()
    step.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert not any(parameter.any() for parameter in model.parameters())
    assert step.eval() is step
    assert not model.training
    assert step.to(torch.float32)(x.float())[1].dtype == torch.float32
    assert next(model.parameters()).dtype == torch.float32
    head = net()
    assert len(list(gramfx.transform(lambda inputs: head(inputs), compile=False).parameters())) == 4


def test_one_tensor_given_twice_and_a_parameter_given_as_input() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4).double()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a * b).square()

    model, x = Two(), batch()[0]
    step = gramfx.transform(model, compile=False)
    for other in (x, x + 1, model.layer.weight):
        objectives, gramian = step(x, other)
        assert reference.relative_error(objectives, model(x, other)) <= 1e-12
        assert reference.relative_error(gramian, wanted(model(x, other), model)) <= 1e-10


class Stateful(nn.Module):
    """Keeps its hidden values in a plain attribute; ``carries`` them into the next call, or only stores them."""

    def __init__(self, carries: bool) -> None:
        super().__init__()
        self.layer, self.carries = nn.Linear(3, 3).double(), carries
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.carries and self.last is not None:
            h = h + self.last
        self.last = h.detach()
        return h.square()


def test_stored_activations_are_no_state_and_leave_no_fakes() -> None:
    model, x = Stateful(carries=False), batch()[0]
    step = gramfx.transform(model, compile=False)
    for shift in (0, 1, 2):
        assert reference.relative_error(step(x + shift)[1], wanted(model(x + shift), model)) <= 1e-10
        assert type(model.last) is Tensor
    assert step.captures == 1


def test_state_carried_in_an_attribute_is_refused() -> None:
    with pytest.raises(gramfx.errors.CaptureMismatchError, match="state kept between calls"):
        gramfx.transform(Stateful(carries=True), compile=False)(batch()[0])


class Remembers(nn.Module):
    """Carries a number that it read into the next call, ``within`` something it holds."""

    def __init__(self, within: str) -> None:
        super().__init__()
        self.layer, self.within = nn.Linear(3, 3).double(), within
        self.held: Any = {"object": Settings(), "nested": {"inner": [0.5, 0]}, "attribute": 0.5}[within]

    def forward(self, x: Tensor) -> Tensor:
        largest = x.max().item()
        if self.within == "object":
            known, self.held.scale = self.held.scale, largest
        elif self.within == "nested":
            known, self.held["inner"][0] = self.held["inner"][0], largest
            self.held["inner"][1] += 1
        else:
            known, self.held = self.held, largest
        return self.layer(x * known).square()


@pytest.mark.parametrize("within", ["object", "nested", "attribute"])
def test_numbers_carried_from_call_to_call_are_those_of_the_plain_model(within: str) -> None:
    """Also where a call leaves the number that it found, so that nothing seems to change."""
    model = Remembers(within)
    plain = copy.deepcopy(model)
    step = gramfx.transform(model, compile=False)
    low, other, high = torch.full((4, 3), 0.5).double(), torch.linspace(0, 0.5, 12).reshape(4, 3).double(), batch()[0]
    for x in (low, other, low, high, low, high):
        outputs, gramian = step(x)
        known = copy.deepcopy(plain)
        assert reference.relative_error(gramian, wanted(known(x), known)) <= 1e-10
        assert reference.relative_error(outputs, plain(x)) <= 1e-12
        held, left = (vars(one.held) if within == "object" else one.held for one in (model, plain))
        assert held == left


def put(holder: Any, at: Any, value: Any) -> None:
    """Set an item, or an attribute."""
    (setattr if isinstance(at, str) else operator.setitem)(holder, at, value)


class Box(dict[str, int]):
    """A dict with a field that it answers from."""

    def __init__(self) -> None:
        self.n = 0

    def items(self) -> Any:
        return [("n", self.n)]

    def __repr__(self) -> str:
        return f"Box({self.n})"


#: What a forward counts in, and how.
COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "object": (lambda: SimpleNamespace(n=0), lambda held: put(held, "n", held.n + 1)),
    "object in an object": (lambda: [Settings()], lambda held: put(held[0], "scale", held[0].scale + 1)),
    "nothing yet": (lambda: SimpleNamespace(), lambda held: put(held, "n", getattr(held, "n", 0) + 1)),
    "deep list": (lambda: [[[[[[0]]]]]], lambda held: put(held[0][0][0][0][0], 0, held[0][0][0][0][0][0] + 1)),
    "long list": (lambda: [0] * 2000, lambda held: put(held, 7, held[7] + 1)),
    "large set": (lambda: set(range(2000)), lambda held: held.add(len(held))),
    "field of a dict": (lambda: Box(), lambda held: put(held, "n", held.n + 1)),
    "array": (lambda: np.zeros(2), lambda held: put(held, 0, held[0] + 1)),
    "deque": (lambda: collections.deque([0], maxlen=1), lambda held: held.append(held[0] + 1)),
}


@pytest.mark.parametrize("within", COUNTERS)
def test_a_forward_counts_once_a_call_wherever_it_counts(within: str) -> None:
    make, count = COUNTERS[within]

    class Counts(nn.Linear):
        held: Any

        def forward(self, x: Tensor) -> Tensor:
            count(self.held)
            return super().forward(x).square()

    model, held = Counts(3, 3).double(), make()
    model.held = make()
    step = gramfx.transform(model, compile=False)
    for _ in range(3):
        step(batch()[0])
        count(held)
        assert repr(model.held) == repr(held)


@dataclasses.dataclass
class Settings:
    """Values that a model reads of an object."""

    scale: float = 1.0


EXPONENT = 1.0


CYCLE: list[Any] = [1.0]
CYCLE.append(CYCLE)


def powered(x: Tensor) -> Tensor:
    """Reads a global."""
    return x.abs() ** (EXPONENT * CYCLE[0])


ORDER = collections.OrderedDict(first=1.0, second=2.0)
BOX = Box()


def test_order_and_fields_of_containers_may_change() -> None:
    """Of globals and of attributes."""

    class Reads(nn.Linear):
        order: Any
        box: Any

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            for order, box in ((ORDER, BOX), (self.order, self.box)):
                for _, factor in order.items():
                    x = (x * factor).tanh()
                for _, number in box.items():
                    x = x + number
            return x

    model = Reads(3, 3).double()
    vars(model).update(order=copy.copy(ORDER), box=Box())
    step = gramfx.transform(model, compile=False)
    source = batch()[0]
    for order, box in ((ORDER, BOX), (vars(model)["order"], vars(model)["box"])):
        assert torch.allclose(step(source)[0], model(source))
        order.move_to_end("first")
        assert torch.allclose(step(source)[0], model(source))
        box.n += 1
        assert torch.allclose(step(source)[0], model(source))


def test_a_list_may_hold_itself() -> None:
    model = nn.Linear(3, 3).double()
    vars(model)["cycle"] = CYCLE
    step = gramfx.transform(model, compile=False)
    for _ in range(2):
        step(batch()[0])
    assert step.captures == 1


def test_read_only_arrays_are_not_copied(tmp_path: Any) -> None:
    np.zeros(4).tofile(tmp_path / "numbers")
    model = nn.Linear(3, 3).double()
    vars(model)["file"] = np.memmap(tmp_path / "numbers", mode="r")
    held = plain_state(nn.Sequential(model)).held
    assert id(model) in held and id(vars(model)["file"]) not in held


def test_a_step_knows_of_the_latest_kinds_of_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramfx.kept.MOST_FAMILIES", 2)
    families = Families()
    assert families.first("a", 3) == families.first("a", 4) == 3
    families.fix("a")
    assert families.first("a", 9) is None
    assert families.first("b", 1) == families.first("c", 1) == 1
    assert families.first("a", 5) == 5


class Lazy(collections.OrderedDict[str, int]):
    """Loads what it holds when it is asked, as tables of models do; a capture has nothing to ask it."""

    def _load(self, *_: Any) -> Any:
        raise AssertionError("asked")

    __iter__ = __len__ = keys = values = items = _load


LAZY = Lazy()


def test_containers_that_load_what_they_hold_are_not_asked() -> None:
    class Table(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert LAZY is not None
            return super().forward(x).square()

    model = Table(3, 3).double()
    model.__dict__["table"] = LAZY
    step = gramfx.transform(model, compile=False)
    for _ in range(2):
        step(batch()[0])
    assert step.captures == 1


def test_values_of_objects_classes_and_modules_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(nn.Module):
        factor = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.settings, self.array = nn.Linear(3, 2).double(), Settings(), np.array([1.0])

        def forward(self, x: Tensor) -> Tensor:
            return powered(self.layer(x)) * self.factor * self.settings.scale * float(self.array[0])

    model, x = Reads(), batch()[0]
    step = gramfx.transform(model, compile=False)

    def check() -> None:
        assert reference.relative_error(step(x)[1], wanted(model(x), model)) <= 1e-10

    check()
    monkeypatch.setattr(Reads, "factor", 2.0)
    check()
    model.settings.scale = 3.0
    check()
    model.array[0] = 4.0
    check()
    model.array = np.array([5.0])
    check()
    monkeypatch.setattr(sys.modules[__name__], "EXPONENT", 2.0)
    check()
    assert step.captures == 6
    check()
    assert step.captures == 6


def test_what_a_capture_bakes_in_may_change() -> None:
    class Baked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.act = nn.Linear(3, 2).double(), nn.ReLU()
            self.function: Any = torch.sin
            self.scales = [1.0, 2.0]
            self.mask = torch.ones(2, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.function(self.act(self.layer(x))) * self.scales[1] * self.mask

    model, x = Baked(), batch()[0]
    step = gramfx.transform(model, compile=False)

    def check() -> None:
        assert reference.relative_error(step(x)[1], wanted(model(x), model)) <= 1e-10

    check()
    model.act = nn.Tanh()  # type: ignore[assignment]
    check()
    model.function = torch.cos
    check()
    model.scales[1] = 5.0
    check()
    model.mask.mul_(3)
    check()
    model.mask = torch.tensor([1.0, 0.5], dtype=torch.float64)
    check()
    handle = model.layer.register_forward_hook(lambda module, args, output: output * 2)
    check()
    handle.remove()
    check()
    assert step.captures == 6


def test_a_wrong_gramian_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    slightly_off = lambda *given: gramian_of(*given) * 1.001  # noqa: E731
    monkeypatch.setattr("gramfx.passes.lower_contractions.gramian_of", slightly_off)
    with pytest.raises(gramfx.errors.VerificationError, match="does not fit"):
        gramfx.transform(net(), losses, compile=False)(batch()[0], targets=batch()[1])


def branches_on_size(model: Any, x: Tensor) -> Tensor:
    return model.layer(x) if len(x) > 4 else 2 * model.layer(x)


def divides_by_size(model: Any, x: Tensor) -> Tensor:
    return model.layer(x) / float(len(x))


def slices_by_size(model: Any, x: Tensor) -> Tensor:
    return (model.layer(x) + model.table[: len(x)]).square()


def branches_and_differentiates(model: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model.layer(x).tanh().sum(), x, create_graph=True)
    return slope if len(x) > 4 else 2 * slope


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", [branches_on_size, divides_by_size, slices_by_size, branches_and_differentiates])
def test_no_graph_serves_a_batch_size_it_was_not_made_for(function: Any, dynamic: bool | None) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double()
            self.table = nn.Parameter(torch.linspace(0, 1, 24, dtype=torch.float64).reshape(12, 2))

        def forward(self, x: Tensor) -> Tensor:
            return function(self, x)

    model = Sized()
    step = gramfx.transform(model, compile=False, dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StaticBatchWarning)
        for count in (5, 6, 9, 3, 4, 2):
            x = batch(count)[0]
            objectives, gramian = step(x)
            assert reference.relative_error(objectives, model(x)) <= 1e-12
            assert reference.relative_error(gramian, wanted(model(x), model)) <= 1e-10
            model.zero_grad()
            objectives.sum().backward()
            got = torch.cat([reference.flat(p.grad, p) for p in reference.trainable(model)])
            jacobian = reference.jacobian(model(x), reference.trainable(model))
            assert reference.relative_error(got, jacobian.sum(0)) <= 1e-10


def test_an_op_of_the_users_own_library() -> None:
    @torch.library.custom_op("gramfx_tests::halved", mutates_args=())
    def halved(tensor: Tensor) -> Tensor:
        return tensor / 2

    halved.register_fake(torch.empty_like)
    halved.register_autograd(lambda ctx, gradient: gradient / 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    source = torch.randn(5, 3, dtype=torch.float64)
    step = gramfx.transform(model, lambda out: halved(out).sum(1), compile=False)
    with pytest.warns(CoupledObjectivesWarning, match="halved"):
        _, gramian = step(source)
    jacobian = reference.jacobian(halved(model(source)).sum(1), reference.trainable(model))
    assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-12
