"""What each stage promises, on graphs of the compiler's own and of anybody's."""

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

import gramfx
from gramfx.errors import VerificationError
from gramfx.graph import placeholders, results
from gramfx.ops import GRAMIAN
from gramfx.passes.canonicalize import canonicalize
from gramfx.passes.erase_clones import erase_clones
from gramfx.passes.separate_uses import separate_uses, verify_separated
from gramfx.terms import ParameterTerms
from gramfx.torch_compat import FakeTensorMode
from tests.architectures import ARCHITECTURES, Architecture, load, parameters

aten = torch.ops.aten
CHOSEN = [a for a in ARCHITECTURES if not a.slow and not a.coupled and torch.float64 in a.dtypes][::12]


def captured(architecture: Architecture) -> gramfx.Step:
    loaded = load(architecture, torch.float64)
    step = gramfx.transform(loaded.model, loaded.objective, in_dims=architecture.in_dims, compile=False)
    return step.capture(*loaded.args, targets=loaded.targets, **loaded.kwargs)


@pytest.mark.parametrize("architecture", parameters(CHOSEN))
def test_stages_keep_their_promises(architecture: Architecture) -> None:
    step = captured(architecture)
    separated = step.stage("separated").graph_module
    clones = [node for node in separated.graph.nodes if "use" in node.meta]
    assert len({node.name for node in clones}) == len(clones)
    assert all(node.target is aten.clone.default for node in clones)
    verify_separated(separated)
    for name in ("joint", "gramian"):
        assert {node.name for node in clones} & {
            node.name for node in step.stage(name).graph_module.graph.nodes
        } or not clones
    planned = [n for n in step.stage("planned").graph_module.graph.nodes if n.target is GRAMIAN]
    for node in planned:
        terms = ParameterTerms.from_json(node.args[2])
        assert terms.recipe.strategy in ("outer", "pairwise", "sorted")
        assert ParameterTerms.from_json(terms.to_json()) == terms
    lowered = step.stage("lowered").graph_module
    inputs = set(placeholders(lowered))
    for node in lowered.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output")
        if isinstance(node.target, torch._ops.OpOverload):
            assert node.target is not GRAMIAN and not node.target._schema.is_mutable
        if node.target is aten.clone.default and node.args[0] in inputs:
            assert node in results(lowered) or node.kwargs


def by_hand() -> GraphModule:
    """``tanh(x @ w) @ w.T + w.sum()`` as an FX graph with fake values."""
    graph = Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    product = graph.call_function(aten.mm.default, (x, w))
    curved = graph.call_function(aten.tanh.default, (product,))
    turned = graph.call_function(aten.t.default, (w,))
    back = graph.call_function(aten.mm.default, (curved, turned))
    total = graph.call_function(aten.sum.default, (w,))
    graph.output((graph.call_function(aten.add.Tensor, (back, total)),))
    module = GraphModule(torch.nn.Module(), graph)
    with FakeTensorMode():
        values = {"w": torch.empty(3, 4), "x": torch.empty(5, 3)}
        for node in graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = values[node.name]
            elif node.op == "call_function":
                args = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args]
                node.meta["val"] = node.target(*args)
    w.meta["parameter"], x.meta["batch_dim"] = "w", 0
    return module


def test_separate_uses_on_anybodys_graph() -> None:
    before = by_hand()
    after = separate_uses(before)
    names = [node.name for node in after.graph.nodes if "use" in node.meta]
    assert names == ["w_use0", "t_default_use0", "sum_default_use0"]
    assert not any("use" in node.meta for node in before.graph.nodes)
    w, x = torch.randn(3, 4), torch.randn(5, 3)
    assert torch.equal(before(w, x)[0], after(w, x)[0])


def test_erase_clones_undoes_the_separation() -> None:
    before = canonicalize(by_hand())
    after = erase_clones(separate_uses(before))
    assert "w_use0" not in [node.name for node in after.graph.nodes]


def test_a_use_without_its_clone_is_noticed() -> None:
    with pytest.raises(VerificationError, match=r"(?s)directly.*mm_default reads w"):
        verify_separated(by_hand())


def test_one_operand_twice_is_two_uses() -> None:
    graph = Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    graph.output((graph.call_function(aten.addcmul.default, (x, w, w)),))
    module = GraphModule(torch.nn.Module(), graph)
    with FakeTensorMode():
        for node in graph.nodes:
            if node.op != "output":
                node.meta["val"] = torch.empty(4)
    w.meta["parameter"], x.meta["batch_dim"] = "w", 0
    after = separate_uses(module)
    assert [node.name for node in after.graph.nodes if "use" in node.meta] == ["w_use0", "w_use1"]
