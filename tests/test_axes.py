"""The batch followed through whole models: the verdict, the op it names, and the derivatives themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from gramfx.axes import Loc, Value, quotient, relocate
from gramfx.graph import target_name
from gramfx.passes.trace_axes import Coupling, trace_axes
from gramfx.rules import table

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own, in its export

BATCH = 6
B, T = sympy.symbols("B T", positive=True, integer=True)


@pytest.mark.parametrize(
    ("loc", "old", "new", "extent", "expected"),
    [
        (Loc(1, 1), (7, B, 16), (7 * B, 16), B, Loc(0, 1)),  # attention's tokens first
        (Loc(0, 1), (7 * B, 16), (7, B, 16), B, Loc(1, 1)),
        (Loc(0, 1), (B, 7, 16), (7 * B, 16), B, Loc(0, 7)),
        (Loc(0, 7), (7 * B, 16), (B, 7, 16), B, Loc(0, 1)),
        (Loc(0, T), (B * T, 4), (B, T, 4), B, Loc(0, 1)),
        (Loc(1, 1), (T, B, 8), (T, B * 4, 2), B, Loc(1, 4)),
        (Loc(0, 1), (B, 1, 4), (1, B, 4, 1), B, Loc(1, 1)),
        (Loc(0, 1), (6, 4), (3, 8), 6, None),  # split over two dims
        (Loc(0, 1), (6, 4), (2, 3, 4), 6, None),
        (Loc(0, 1), (6, 4), (4, 6), 6, None),
        (Loc(0, 1), (B, 4), (4 * B,), B, Loc(0, 4)),
        (Loc(0, 1), (2 * B, 4), (2, B, 4), B, Loc(1, 1)),  # two towers, one after the other
    ],
)
def test_a_view_moves_the_digit(loc: Loc, old: Any, new: Any, extent: Any, expected: Loc | None) -> None:
    assert relocate(loc, old, new, extent) == expected


@pytest.mark.parametrize("inner", [1, 2, 3])
@pytest.mark.parametrize("new", [(24,), (2, 12), (4, 6), (12, 2), (2, 3, 4), (2, 2, 6), (3, 8), (6, 2, 2), (1, 24)])
def test_a_view_moves_the_digit_as_the_flat_index_does(inner: int, new: tuple[int, ...]) -> None:
    """A place found is the right one at every entry; where none is found no dim alone tells the sample."""
    old, batch = (12, 2), 12 // inner // (2 if inner != 3 else 1)
    owner = (torch.arange(12) // inner % batch).reshape(12, 1).expand(old).reshape(new)

    def digit(loc: Loc) -> Tensor:
        index = torch.arange(new[loc.dim]) // int(loc.inner) % batch
        return index.reshape([-1 if d == loc.dim else 1 for d in range(len(new))]).expand(new)

    found = relocate(Loc(0, inner), old, new, batch)
    possible = [Loc(d, i) for d, n in enumerate(new) for i in range(1, n + 1) if n % (i * batch) == 0]
    right = [loc for loc in possible if torch.equal(digit(loc), owner)]
    assert found == (right[0] if right else None)
    assert len(right) <= 1


def test_a_size_divides_for_every_value_of_its_symbols_or_not_at_all() -> None:
    assert quotient(7 * B, B) == 7 and quotient(B * T, T) == B and quotient(B * (T + 1), B) == T + 1
    assert quotient(B, 2) is None and quotient(B + T, B) is None and quotient(7, 2) is None and quotient(7, 0) is None


class Model(nn.Module):
    """A function of modules and one input."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def vectors() -> Tensor:
    return torch.randn(BATCH, 5)


def tokens() -> Tensor:
    return torch.randn(BATCH, 7, 16)


def images() -> Tensor:
    return torch.randn(BATCH, 4, 8, 8)


def rows(value: Tensor) -> Tensor:
    return value.pow(2).flatten(1).sum(1)


def linear() -> nn.Linear:
    return nn.Linear(5, 4)


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 6, 3)


def attention(model: Any, x: Tensor) -> Tensor:
    return rows(model.last(model.attend(x, x, x, need_weights=False)[0]))


def towers(model: Any, x: Tensor) -> Tensor:
    left, right = model.first(torch.cat([x, x.flip(1)])).chunk(2)
    return (left * right).sum(1)


def picked(model: Any, x: Tensor) -> Tensor:
    return model.first(x).log_softmax(1)[torch.arange(x.shape[0]), x.argmax(1) % 4]


def positions(model: Any, x: Tensor) -> Tensor:
    return rows(model.first(x + model.table(torch.arange(7)[None])))


def per_sample_weights(model: Any, x: Tensor) -> Tensor:
    kernel = model.first(x.mean((2, 3))).reshape(-1, 1, 2, 2)
    return rows(nn.functional.conv2d(x.mean(1)[None], kernel, groups=x.shape[0])[0])


MHA = lambda: nn.MultiheadAttention(16, 4, batch_first=True)  # noqa: E731

INDEPENDENT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: Model(lambda m, x: rows(m.first(x).tanh()), first=linear()), vectors),
    "attention": (lambda: Model(attention, attend=MHA(), last=nn.Linear(16, 3)), tokens),
    "encoder": (
        lambda: Model(
            lambda m, x: rows(m.layer(x)), layer=nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
        ),
        tokens,
    ),
    "conv net": (lambda: Model(lambda m, x: rows(nn.functional.max_pool2d(m.conv(x).relu(), 2)), conv=conv()), images),
    "group norm": (lambda: Model(lambda m, x: rows(m.norm(m.conv(x))), conv=conv(), norm=nn.GroupNorm(3, 6)), images),
    "instance norm": (
        lambda: Model(lambda m, x: rows(m.norm(m.conv(x))), conv=conv(), norm=nn.InstanceNorm2d(6, affine=True)),
        images,
    ),
    "batch norm in eval": (
        lambda: Model(lambda m, x: rows(m.norm(m.conv(x))), conv=conv(), norm=nn.BatchNorm2d(6)).eval(),
        images,
    ),
    "batch norm of inputs": (
        lambda: Model(lambda m, x: rows(m.conv(m.norm(x))), conv=conv(), norm=nn.BatchNorm2d(4, affine=False)),
        images,
    ),
    "centred inputs": (lambda: Model(lambda m, x: rows(m.first(x - x.mean(0))), first=linear()), vectors),
    "position table": (lambda: Model(positions, first=nn.Linear(16, 4), table=nn.Embedding(7, 16)), tokens),
    "picked scores": (lambda: Model(picked, first=linear()), vectors),
    "detached keys": (
        lambda: Model(lambda m, x: (m.first(x) @ m.first(x).detach().T).logsumexp(1), first=linear()),
        vectors,
    ),
}
STATIC_ONLY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "two towers": (lambda: Model(towers, first=linear()), vectors),
    "a kernel a sample": (lambda: Model(per_sample_weights, first=nn.Linear(4, 4)), images),
}
COUPLED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "centred": (
        lambda: Model(lambda m, x: rows(m.first(x) - m.first(x).mean(0)), first=linear()),
        vectors,
        "aten.mean.dim",
    ),
    "similarities": (
        lambda: Model(lambda m, x: (m.first(x) @ m.first(x).T).logsumexp(1), first=linear()),
        vectors,
        "aten.matmul",
    ),
    "softmax over the batch": (
        lambda: Model(lambda m, x: rows(m.first(x).softmax(0)), first=linear()),
        vectors,
        "aten.softmax.int",
    ),
    "batch norm in training": (
        lambda: Model(lambda m, x: rows(m.norm(m.conv(x))), conv=conv(), norm=nn.BatchNorm2d(6)),
        images,
        "aten._native_batch_norm_legit_functional",
    ),
    "neighbours": (
        lambda: Model(lambda m, x: rows(m.first(x) + m.first(x).roll(1, 0)), first=linear()),
        vectors,
        "aten.roll",
    ),
    "one for all": (
        lambda: Model(lambda m, x: rows(m.first(x) * m.first(x)[:1]), first=linear()),
        vectors,
        "aten.slice.Tensor",
    ),
    "attention across the batch": (
        lambda: Model(lambda m, x: rows(m.attend(x, x, x, need_weights=False)[0]), attend=nn.MultiheadAttention(16, 4)),
        tokens,
        "aten.scaled_dot_product_attention",
    ),
}


def captured(model: nn.Module, x: Tensor, dynamic: bool) -> tuple[GraphModule, Coupling, Node, list[Tensor]]:
    """A model's functional graph, its coupling, its objectives, and the tensors its placeholders stand for."""
    shapes = ({0: Dim("B", min=2, max=64)},) if dynamic else None
    program = torch.export.export(model, (x,), dynamic_shapes=shapes).run_decompositions({})
    signature = program.graph_signature
    (given,) = signature.user_inputs
    (output,) = signature.user_outputs
    nodes = {node.name: node for node in program.graph.nodes}
    batch = nodes[given].meta["val"].shape[0]
    coupling = trace_axes(program.graph_module, {given: 0}, batch, signature.inputs_to_parameters, nodes[output])
    assert isinstance(batch, torch.SymInt) == dynamic, "the analysis fixed the batch"
    named = {**dict(model.named_parameters()), **dict(model.named_buffers()), **program.constants}
    sources = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    tensors = [x if p.name == given else named[sources[p.name]] for p in program.graph.find_nodes(op="placeholder")]
    return program.graph_module, coupling, nodes[output], tensors


class Cotangents(Interpreter):
    """Runs a graph and keeps the values of the differentiable nodes that carry the batch."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self.kept: dict[Node, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        axes = n.meta["axes"]
        if isinstance(result, Tensor) and result.requires_grad and isinstance(axes, Value) and axes.batch:
            self.kept[n] = result
        return result


def scaled_alike(graph_module: GraphModule, objectives: Node, tensors: list[Tensor], batch: int) -> dict[Node, bool]:
    """For each node: is row b of the cotangent of ``Σ s_b r_b y_b`` that of ``Σ s_b y_b``, times ``r_b``, bit for bit?

    ``r`` are powers of two, so scaling commutes with rounding, and ``s`` is random.
    """
    run = Cotangents(graph_module)
    run.run(*tensors)
    y = run.kept[objectives]
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(batch, generator=generator)
    ratios = 2.0 ** torch.randperm(batch, generator=generator)
    nodes = list(run.kept)
    values = [run.kept[node] for node in nodes]
    plain, scaled = (
        torch.autograd.grad(y, values, w, retain_graph=True, allow_unused=True) for w in (weights, weights * ratios)
    )
    verdicts = {}
    for node, a, b in zip(nodes, plain, scaled, strict=True):
        if a is not None and node.meta["axes"].differentiable:
            loc = node.meta["axes"].batch
            sample = torch.arange(a.shape[loc.dim]) // int(sympy.sympify(loc.inner)) % batch
            factor = ratios[sample].reshape([-1 if d == loc.dim else 1 for d in range(a.dim())])
            verdicts[node] = torch.equal(a * factor, b)
    return verdicts


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", INDEPENDENT)
def test_independent_models_are_proven_so(case: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    build, inputs = INDEPENDENT[case]
    graph_module, coupling, objectives, tensors = captured(build(), inputs(), dynamic)
    assert coupling.first is None and not coupling.coupled
    assert objectives.meta["axes"].batch == Loc(0, 1) and objectives.meta["axes"].differentiable
    verdicts = scaled_alike(graph_module, objectives, tensors, BATCH)
    assert len(verdicts) > 1 and all(verdicts.values()), verdicts


@pytest.mark.parametrize("case", STATIC_ONLY)
def test_independent_models_of_a_static_batch_are_proven_so(case: str) -> None:
    torch.manual_seed(0)
    build, inputs = STATIC_ONLY[case]
    graph_module, coupling, objectives, tensors = captured(build(), inputs(), False)
    assert coupling.first is None, str(coupling.first)
    verdicts = scaled_alike(graph_module, objectives, tensors, BATCH)
    assert len(verdicts) > 1 and all(verdicts.values()), verdicts


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", COUPLED)
def test_coupled_models_are_found_and_the_op_named(case: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    build, inputs, op = COUPLED[case]
    graph_module, coupling, objectives, tensors = captured(build(), inputs(), dynamic)
    assert coupling.first is not None
    assert target_name(coupling.first.node) == op and op in str(coupling.first)
    verdicts = scaled_alike(graph_module, objectives, tensors, BATCH)
    assert all(alike for node, alike in verdicts.items() if node not in coupling.coupled), "an unsound claim"
    assert not all(alike for node, alike in verdicts.items() if node in coupling.coupled), "a needless flag"


def test_objectives_averaged_over_the_batch_couple_everything_above() -> None:
    model = Model(lambda m, x: m.first(x).pow(2).mean(), first=linear())
    _, coupling, objectives, _ = captured(model, vectors(), True)
    assert objectives.meta["axes"].batch is None
    assert coupling.first is not None and target_name(coupling.first.node) == "aten.mean"
    assert {n.name for n in coupling.coupled} >= {"linear", "pow_1"} and objectives not in coupling.coupled


def test_a_batch_in_another_dim_is_followed() -> None:
    model = Model(lambda m, x: m.first(x).pow(2).sum((0, 2)), first=linear())
    program = torch.export.export(model, (torch.randn(3, BATCH, 5),)).run_decompositions({})
    (given,) = program.graph_signature.user_inputs
    coupling = trace_axes(program.graph_module, {given: 1}, BATCH, program.graph_signature.inputs_to_parameters)
    assert coupling.first is None


def traced(function: Callable[..., Tensor], *tensors: Tensor) -> Coupling:
    """The coupling of a graph below autograd: the first tensor is the batch, the others are trainable."""
    graph_module = make_fx(function)(*tensors)
    data, *parameters = (node.name for node in graph_module.graph.find_nodes(op="placeholder"))
    return trace_axes(graph_module, {data: 0}, tensors[0].shape[0], parameters)


def test_graphs_below_autograd_and_of_gradients_are_followed() -> None:
    def input_gradients(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        hidden = torch.layer_norm(nn.functional.linear(x, w, b).tanh(), (4,))
        (slope,) = torch.autograd.grad(hidden.pow(2).sum(), x, create_graph=True)
        return slope.pow(2).sum(1)

    assert traced(input_gradients, vectors(), torch.randn(4, 5), torch.randn(4)).first is None


def test_an_op_without_a_rule_couples_by_name() -> None:
    graph = Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    h = graph.call_function(torch.ops.aten.mul.Tensor, (x, w))
    y = graph.call_function(torch.sort, (h,))
    graph.output(y)
    for node, shape in ((x, (BATCH, 5)), (w, (5,)), (h, (BATCH, 5)), (y, (BATCH, 5))):
        node.meta["val"] = torch.empty(shape, device="meta")
    coupling = trace_axes(GraphModule(nn.Module(), graph), {"x": 0}, BATCH, ["w"], y)
    assert coupling.first is not None and "sort" in str(coupling.first)
    assert coupling.coupled == {h, w}


def test_an_op_without_a_rule_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("layer_norm", "cosine_similarity"):
        monkeypatch.delitem(table.AXIS_RULES, f"aten.{name}")
    fine = Model(lambda m, x: rows(torch.layer_norm(m.first(x), (4,))), first=linear())
    mixing = Model(
        lambda m, x: torch.cosine_similarity(m.first(x), m.first(x).tanh(), 0)[None] * x[:, :4], first=linear()
    )
    for dynamic in (False, True):
        assert captured(fine, vectors(), dynamic)[1].first is None
        first = captured(mixing, vectors(), dynamic)[1].first
        assert first is not None and target_name(first.node) == "aten.cosine_similarity"


def test_an_op_without_a_rule_couples_what_is_above_it() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.beside = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)
            self.recurrent = torch.nn.LSTM(3, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.recurrent(self.below(x))[1][0][0].sum(-1) + self.beside(x).sum((1, 2))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on its own recurrent layers
        program = torch.export.export(Net(), (torch.randn(5, 4, 3),), strict=False).run_decompositions({})
    module = program.graph_module
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    coupling = trace_axes(module, {names[-1]: 0}, 5, [name for name in names if name.startswith("p_")])
    coupled = {node.name for node in coupling.coupled}
    assert "linear" in coupled
    assert "linear_1" not in coupled
