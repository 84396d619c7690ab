"""How modules are put together: nesting, branches, several inputs and outputs, pytrees, side effects."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.architectures.base import Architecture
from tests.architectures.formulas import concatenate, formula, plain, randn, wired


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Silent(nn.Module):
    """Owns a parameter and returns something without tensors."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.weight, self.answer = nn.Parameter(torch.randn(3, 3)), answer

    def forward(self, x: Tensor) -> Any:
        x @ self.weight
        return self.answer


class Pytrees(nn.Module):
    """Nested containers in, nested containers out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, batch: dict[str, Any], extra: list[Tensor]) -> dict[str, Any]:
        first, (second, third) = batch["first"], batch["rest"]
        h = self.left(first) + self.right(second) * third
        return {"main": (h, [h + extra[0]]), "side": {"sum": h.sum(1), "label": "kept", "nothing": None}}


class Configured(nn.Module):
    """Takes strings, numbers and a tensor inside one container."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, activation: str, options: dict[str, Any], *, shift: Tensor, power: int = 1) -> Tensor:
        h = getattr(torch, activation)(self.layer(x)) * options["scale"]
        return (h + options["offsets"][0] + shift) ** power


class Buffered(nn.Module):
    """Reads a buffer, and counts its calls in another."""

    calls: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1.0
        self.steps += 1
        return self.layer(x) * self.scale * self.calls


class Checkpointed(nn.Module):
    """Recomputes its middle in the backward pass, once with every kind of argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), mlp(4, 5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h + checkpoint(self.middle, h, use_reentrant=False))


def nested(depth: int) -> nn.Module:
    """A layer inside `depth` Sequentials, each with a layer of its own around it."""
    if depth == 0:
        return nn.Linear(3, 3)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nested(depth - 1)))


def pytree_inputs() -> tuple[Any, ...]:
    """A dict with a tuple inside, and a list."""
    return {"first": torch.randn(4, 3), "rest": (torch.randn(4, 2), torch.randn(4, 1))}, [torch.randn(4, 2)]


def pytree_objective(output: dict[str, Any]) -> Tensor:
    """Three objectives a sample."""
    return torch.cat([output["main"][1][0], output["side"]["sum"][:, None]], 1)


def two() -> dict[str, nn.Module]:
    """Two layers of one shape."""
    return {"a": nn.Linear(3, 4), "b": nn.Linear(3, 4)}


def silent(answer: Any) -> dict[str, nn.Module]:
    """A layer beside a module that returns `answer`."""
    return {"quiet": Silent(answer), "layer": nn.Linear(3, 2)}


def call_both(m: Any, x: Tensor) -> Tensor:
    """Calls the quiet module and drops what it says."""
    m.quiet(x)
    return m.layer(x)


def noise_times_input(m: Any, x: Tensor) -> Tensor:
    """Fresh noise in every forward, in front of and behind the layer."""
    return m.layer(x * torch.rand_like(x)) * torch.randn(x.shape[0], 1, dtype=x.dtype, device=x.device)


STRUCTURE = [
    plain("mlp", lambda: mlp(3, 5, 4, 2), randn((4, 3))),
    plain("identity_like_single_linear", lambda: nn.Linear(3, 1), randn((4, 3))),
    plain("deep_nesting", lambda: nested(4), randn((4, 3))),
    wired("branches_summed", two, lambda m, x: torch.tanh(m.a(x)) + m.b(x).sigmoid(), randn((4, 3))),
    wired("branches_concatenated", two, lambda m, x: torch.cat([m.a(x), x, m.b(x).relu()], 1), randn((4, 3))),
    wired("branches_multiplied", two, lambda m, x: m.a(x) * m.b(x).sigmoid(), randn((4, 3))),
    wired("residual", lambda: {"a": nn.Linear(3, 3)}, lambda m, x: x + m.a(F.silu(m.a(x))), randn((4, 3))),
    wired("several_inputs", two, lambda m, x, y, z: m.a(x) + m.b(y) * z, randn((4, 3), (4, 3), (4, 1))),
    wired(
        "several_outputs", two, lambda m, x: (m.a(x), m.b(x).sum(1, keepdim=True)), randn((4, 3)), objective=concatenate
    ),
    wired(
        "one_output_of_several_ignored",
        two,
        lambda m, x: (m.a(x), m.b(x)),
        randn((4, 3)),
        objective=lambda o: o[0],
        zero=("b",),
    ),
    wired(
        "heads_in_a_list",
        two,
        lambda m, x: [m.a(x).sum(1), m.b(x).sum(1)],
        randn((4, 3)),
        objective=lambda o: torch.stack(o, 1),
    ),
    plain("pytrees_in_and_out", Pytrees, pytree_inputs, objective=pytree_objective),
    wired("submodule_returns_none", lambda: silent(None), call_both, randn((4, 3)), zero=("quiet",)),
    wired("submodule_returns_empty_tuple", lambda: silent(()), call_both, randn((4, 3)), zero=("quiet",)),
    wired(
        "submodule_returns_empty_pytree",
        lambda: silent({"a": [], "b": ((), {})}),
        call_both,
        randn((4, 3)),
        zero=("quiet",),
    ),
    wired(
        "submodule_result_with_empty_parts",
        lambda: silent({"a": [], "b": (None, ())}),
        lambda m, x: {"y": m.layer(x), "rest": m.quiet(x)},
        randn((4, 3)),
        objective=lambda o: o["y"],
        zero=("quiet",),
    ),
    Architecture(
        name="mixed_arguments",
        build=Configured,
        in_dims=(0, None, None),
        inputs=lambda: (
            torch.randn(4, 3),
            "sigmoid",
            {"scale": 1.5, "offsets": (torch.tensor([0.1]), "unused", 3, None)},
        ),
        keywords=lambda: {"shift": torch.randn(4, 1), "power": 2},
    ),
    wired(
        "optional_input_left_out",
        two,
        lambda m, x, y=None: m.a(x) if y is None else m.a(x) + m.b(y),
        lambda: (torch.randn(4, 3), None),
        zero=("b",),
    ),
    plain("buffers", Buffered, randn((4, 3))),
    wired("noise_times_input", lambda: {"layer": nn.Linear(3, 2)}, noise_times_input, randn((4, 3)), random=True),
    plain(
        "dropout2d_around_conv",
        lambda: nn.Sequential(nn.Dropout2d(0.4), nn.Conv2d(3, 4, 2), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(16, 1)),
        randn((4, 3, 3, 3)),
        random=True,
    ),
    plain(
        "dropout_eval", lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).eval(), randn((4, 3))
    ),
    plain("checkpointed", Checkpointed, randn((4, 3))),
    plain(
        "inplace_activations",
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2), nn.ELU(inplace=True)),
        randn((4, 3)),
    ),
    wired("inplace_sum", two, lambda m, x: m.a(x).mul_(2.0).add_(m.b(x)), randn((4, 3))),
    wired("inplace_slice", lambda: {"a": nn.Linear(3, 4)}, lambda m, x: _fill(m.a(x), x), randn((4, 3))),
    wired(
        "module_containers",
        lambda: {"m": nn.ModuleDict({"x": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 2)])})},
        lambda m, x: m.m["x"][1](m.m["x"][0](x).relu()),
        randn((4, 3)),
    ),
    wired("batch_second", lambda: {"a": nn.Linear(3, 2)}, lambda m, x: m.a(x).mean(0), randn((5, 4, 3)), in_dims=1),
    wired("batch_last", lambda: {"a": nn.Linear(3, 2)}, lambda m, x: m.a(x.movedim(-1, 0)), randn((3, 4)), in_dims=1),
    wired("batch_dims_differ", two, lambda m, x, y: m.a(x) + m.b(y.mean(0)), randn((4, 3), (5, 4, 3)), in_dims=(0, 1)),
    wired(
        "shared_input_without_batch",
        two,
        lambda m, x, grid: m.a(x) * m.b(grid).mean(0),
        randn((4, 3), (6, 3)),
        in_dims=(0, None),
    ),
    wired(
        "flattened_tokens",
        lambda: {"a": nn.Linear(3, 2)},
        lambda m, x: m.a(x.flatten(0, 1)).tanh().view(4, 5, 2).sum(1),
        randn((4, 5, 3)),
        alone=False,
    ),
    wired(
        "tokens_flattened_by_minus_one",
        two,
        lambda m, x: torch.tanh(m.a(x.reshape(-1, 3))).reshape(x.shape[0], -1).sum(1),
        randn((4, 5, 3)),
        zero=("b",),
    ),
    formula("batch_of_one", {"w": (3, 2)}, lambda p, x: torch.tanh(x @ p.w), randn((1, 3)), batch_size=1),
    formula("no_samples", {"w": (3, 2)}, lambda p, x: torch.tanh(x @ p.w), randn((0, 3)), batch_size=0),
    formula("activations_of_size_one", {"w": (1, 1)}, lambda p, x: torch.tanh(x @ p.w), randn((4, 1))),
]


def _fill(h: Tensor, x: Tensor) -> Tensor:
    h[:, 1] = x[:, 0] * 2.0
    return h.tanh()
