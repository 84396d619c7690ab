"""Plans: the memory that they promise, the batch sizes they hold for, and plans kept and given again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import gramfx
from gramfx.errors import InputError, MemoryBudgetError
from gramfx.memory import profile
from gramfx.plan import Plan
from gramfx.regimes import crossings
from tests import reference

MACHINE = {
    "name": "fixed",
    "flops": {"float32": 1e11, "float64": 5e10},
    "bandwidth": 1e10,
    "cached_bandwidth": 1e11,
    "latency": 5e-6,
    "cache": 2**24,
    "half": 32,
}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans go by one machine, whatever runs the tests."""
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(MACHINE))
    monkeypatch.setenv("GRAMFX_MACHINE", str(path))


class Through(nn.Module):
    """A linear layer whose weight is a softmax: rows of its Jacobian come from VJPs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.softmax(0))


class Twice(nn.Module):
    """One layer on two inputs of different numbers of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(x)).mean(1)))


def token_mean(output: Tensor) -> Tensor:
    return output.sin().flatten(1).mean(1)


def channel_mean(output: Tensor) -> Tensor:
    return output.sin().flatten(2).mean(2)


Objective = Callable[[Tensor], Tensor] | None
Entry = tuple[Callable[[], nn.Module], Callable[[int], Tensor], Objective]


def floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape, dtype=torch.float64)


MODELS: dict[str, Entry] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 3)), floats(24), None),
    "tokens": (lambda: nn.Sequential(nn.Linear(24, 16), nn.Tanh()), floats(12, 24), token_mean),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), floats(4, 9, 9), channel_mean),
    "table": (lambda: nn.Embedding(120, 8), lambda batch: torch.randint(120, (batch, 10)), token_mean),
    "through": (Through, floats(24), token_mean),
    "twice": (Twice, floats(6, 16), token_mean),
}


#: Where there is no room, what a model goes through is planned many times.
OFTEN_PLANNED = [pytest.param(name, marks=pytest.mark.slow) if name == "through" else name for name in MODELS]


def made(name: str, batch: int) -> tuple[nn.Module, Tensor, Objective, Tensor]:
    """A model, its input, its objective and the Gramian by autograd."""
    build, inputs, objective = MODELS[name]
    torch.manual_seed(1)
    model, given = build().double(), inputs(batch)
    output = model(given)
    jacobian = reference.jacobian(output if objective is None else objective(output), reference.trainable(model))
    return model, given, objective, jacobian @ jacobian.T


def attempt(name: str, batch: int, budget: int) -> gramfx.Step | MemoryBudgetError:
    """A step that ran under a budget and was right, or why it could not; then nothing of the user's changed."""
    model, given, objective, want = made(name, batch)
    before = reference.snapshot(model)
    step = gramfx.transform(model, objective, compile=False, dynamic=False, memory_budget=budget)
    try:
        _, gramian = step(given)
    except MemoryBudgetError as error:
        assert reference.differences(before, reference.snapshot(model)) == []
        return error
    assert reference.relative_error(gramian, want) <= 1e-10
    return step


def kept_promise(step: gramfx.Step, budget: int) -> bool:
    plan = step.plan
    peak = profile(step.stage("lowered").graph_module, plan.batch).peak
    assert plan.totals.peak == peak
    return peak <= plan.totals.plain_peak + budget


@pytest.mark.parametrize("batch", [16])
@pytest.mark.parametrize("name", OFTEN_PLANNED)
def test_no_budget_is_broken(name: str, batch: int) -> None:
    for budget in (0, 20_000):
        step = attempt(name, batch, budget)
        assert isinstance(step, MemoryBudgetError) or kept_promise(step, budget)


@pytest.mark.parametrize("batch", [16])
@pytest.mark.parametrize("name", OFTEN_PLANNED)
def test_the_least_budget_named_in_an_error_is_enough_and_needed(name: str, batch: int) -> None:
    refused = attempt(name, batch, 0)
    if isinstance(refused, MemoryBudgetError):
        step = attempt(name, batch, refused.least)
        assert isinstance(step, gramfx.Step), (refused.least, step.least)
        assert kept_promise(step, refused.least)
        assert isinstance(attempt(name, batch, int(refused.least * 0.9)), MemoryBudgetError)


def test_rows_by_vjps_are_made_in_blocks_where_memory_is_short() -> None:
    refused = attempt("through", 64, 0)
    step = attempt("through", 64, refused.least if isinstance(refused, MemoryBudgetError) else 0)
    assert isinstance(step, gramfx.Step)
    (contraction,) = step.plan.contractions
    assert contraction.recipe.made and contraction.fallback
    assert contraction.recipe.samples or contraction.recipe.parts > 1 or contraction.recipe.chunk


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", ["pairwise", "outer", "sorted"])
def test_forced_strategies_agree(name: str, strategy: str) -> None:
    model, given, objective, want = made(name, 5)
    step = gramfx.transform(model, objective, compile=False, dynamic=False).capture(given)
    plan = step.plan.forced(strategy)
    forced = gramfx.transform(model, objective, compile=False, dynamic=False, plan=plan)
    assert reference.relative_error(forced(given)[1], want) <= 1e-10
    assert forced.plan == plan


# ---------------------------------------------------------------- plans kept, given again, or measured


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_kept_as_json_is_the_same_and_is_taken(name: str) -> None:
    model, given, objective, want = made(name, 5)
    plan = gramfx.transform(model, objective, compile=False, dynamic=False).capture(given).plan
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert str(again) == str(plan)
    step = gramfx.transform(model, objective, compile=False, dynamic=False, plan=again)
    assert reference.relative_error(step(given)[1], want) <= 1e-10
    assert step.plan == plan


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "3", '{"contractions": []}', '{"contractions": [1]}'])
def test_anything_else_is_no_plan(text: str) -> None:
    with pytest.raises(InputError, match="no plan"):
        Plan.from_json(text)


@pytest.mark.slow
def test_a_tightening_budget_makes_the_largest_rows_in_blocks_first() -> None:
    torch.manual_seed(0)
    layers = (weight_norm(nn.Linear(64, 96)), nn.Tanh(), weight_norm(nn.Linear(96, 32)))
    model, inputs = nn.Sequential(*layers).double(), torch.randn(16, 64, dtype=torch.float64)
    found = []
    for budget in (2**40, 1_550_000, 900_000, 250_000):
        step = gramfx.transform(model, lambda o: o.square().sum(1), compile=False, memory_budget=budget)
        plan = step.capture(inputs).plan
        found.append([one.parameter for one in plan.contractions if one.recipe.made])
    assert found[0] == []
    assert [len(one) for one in found] == sorted(len(one) for one in found)
    partly = [one for one in found if 0 < len(one) < len(found[-1])]
    assert partly
    assert all("0.parametrizations.weight.original1" in one for one in partly)


def test_the_plan_of_another_model_is_refused() -> None:
    model, given, objective, _ = made("tokens", 5)
    plan = gramfx.transform(model, objective, compile=False, dynamic=False).capture(given).plan
    wider = nn.Sequential(nn.Linear(24, 17), nn.Tanh()).double()
    with pytest.raises(InputError, match="another model"):
        gramfx.transform(wider, objective, compile=False, dynamic=False, plan=plan)(given)
    renamed = nn.ModuleDict({"layer": model})
    with pytest.raises(InputError, match="another model"):
        gramfx.transform(lambda x: renamed["layer"](x).exp(), objective, compile=False, dynamic=False, plan=plan)(given)


@pytest.mark.parametrize("name", MODELS)
def test_measured_plans_are_exact(name: str) -> None:
    model, given, objective, want = made(name, 4)
    step = gramfx.transform(model, objective, compile=False, dynamic=False, plan="measure")
    random = torch.get_rng_state()
    assert reference.relative_error(step(given)[1], want) <= 1e-10
    assert torch.equal(torch.get_rng_state(), random)


# ---------------------------------------------------------------- batch sizes


@pytest.mark.parametrize("name", ["perceptron", "tokens", "convolution", "table", "twice"])
def test_one_symbolic_graph_is_exact_for_every_batch_in_its_regime(name: str) -> None:
    model, given, objective, _ = made(name, 5)
    step = gramfx.transform(model, objective, compile=False, dynamic=True)
    for batch in (5, 3, 9, 33):
        _, given, _, _ = made(name, batch)
        output = model(given)
        jacobian = reference.jacobian(output if objective is None else objective(output), reference.trainable(model))
        assert reference.relative_error(step(given)[1], jacobian @ jacobian.T) <= 1e-10
        assert batch in step.plan.regime
    assert step.captures == 1


@pytest.mark.parametrize("name", ["perceptron", "tokens", "convolution", "table", "twice"])
def test_polynomials_of_a_plan_are_its_numbers_at_its_batch(name: str) -> None:
    model, given, objective, _ = made(name, 7)
    plan = gramfx.transform(model, objective, compile=False, dynamic=True).capture(given).plan
    for one in plan.contractions:
        assert [int(sympy.sympify(p).subs("B", 7)) for p in one.polynomials] == [one.flops, one.moved, one.peak]
        assert all(one.seconds <= seconds for _, seconds in one.others)
        assert 7 in one.regime


B = sympy.Symbol("B")
POLYNOMIALS = [
    (B - 5, 3),
    (B - 5, 5),
    (5 - B, 5),
    (5 - B, 9),
    ((B - 3) * (B - 8), 5),
    ((B - 3) * (B - 8), 3),
    ((B - 3) * (B - 8), 8),
    (-(B - 3) * (B - 8), 2),
    (-(B - 3) * (B - 8), 9),
    (2 * B**2 - 2 * B * 31 - 17, 12),
    (B**2 - 200, 14),
    (7 * B - 50, 7),
    (50 - 7 * B, 8),
    ((B - sympy.Rational(199, 100)) * -1, 2),
    ((B - sympy.Rational(201, 100)), 2),
    ((B - 4) * (B - 20) * (B - 50), 30),
    ((B - 4) * (B - 20) * (B - 50), 2),
    (sympy.Integer(-1), 4),
    (sympy.Integer(0), 4),
    (-B, 4),
]


@pytest.mark.parametrize(("formula", "at"), POLYNOMIALS, ids=[f"{f} at {at}" for f, at in POLYNOMIALS])
def test_crossings_against_counting(formula: sympy.Expr, at: int) -> None:
    polynomial = sympy.Poly(formula, B, domain="QQ")
    assert polynomial.eval(at) <= 0
    good = [polynomial.eval(size) <= 0 for size in range(1001)]
    first, last = at, at
    while first > 1 and good[first - 1]:
        first -= 1
    while last < 1000 and good[last + 1]:
        last += 1
    assert crossings(polynomial, at) == (first, None if last == 1000 else last)


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_in_half_precision(dtype: torch.dtype) -> None:
    """The Gramian is that of the same numbers in float64, as well as factors of this dtype can tell."""
    torch.manual_seed(0)
    model, given = nn.Linear(32, 8).to(dtype), torch.randn(6, 32).to(dtype)
    _, gramian = gramfx.transform(model, compile=False, dynamic=False)(given)
    assert gramian.dtype == dtype
    double = nn.Linear(32, 8).double()
    double.load_state_dict(model.state_dict())
    want = reference.gramian(double(given.double()), reference.trainable(double))
    assert reference.relative_error(gramian, want) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("forced", ["", "pairwise"])
def test_tokens_that_cancel_in_a_step(forced: str) -> None:
    torch.manual_seed(0)
    one, noise = torch.randn(4, 256, 16), torch.randn(4, 256, 16)
    given, model = torch.cat([one, one + 1e-3 * noise], 1), nn.Linear(16, 3, bias=False)
    signs = torch.cat([torch.ones(256), -torch.ones(256)])[:, None]

    def objective(output: Tensor) -> Tensor:
        return (output * signs.to(output)).sum(1)

    step = gramfx.transform(model, objective, compile=False, dynamic=False).capture(given)
    plan = step.plan.forced(forced) if forced else step.plan
    _, gramian = gramfx.transform(model, objective, compile=False, dynamic=False, plan=plan)(given)
    double = nn.Linear(16, 3, bias=False).double()
    double.load_state_dict(model.state_dict())
    want = reference.gramian(objective(double(given.double())), reference.trainable(double))
    assert reference.relative_error(gramian, want) <= 1e-3
