"""``reuse="separate"``: the sum over uses of ``J_u J_uᵀ``, each ``J_u`` through that use alone."""

import warnings

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

import gramfx
from gramfx.errors import CoupledObjectivesWarning
from tests import reference
from tests.architectures import ARCHITECTURES, FAMILIES, Architecture, load, parameters

CHOSEN = [
    a
    for family in ("sharing", "views", "lookup", "derived", "attention")
    for a in FAMILIES[family]
    if not a.slow and not a.random and torch.float64 in a.dtypes
]


class _OneUse(Interpreter):
    """Runs a separated graph; only one clone passes gradients on."""

    def __init__(self, graph_module: GraphModule, use: Node) -> None:
        super().__init__(graph_module)
        self.use = use

    def run_node(self, n: Node) -> object:
        result = super().run_node(n)
        return result.detach() if "use" in n.meta and n is not self.use else result


def by_autograd(separated: GraphModule, tensors: list[Tensor], learned: list[Tensor]) -> Tensor:
    """``Σ_u J_u J_uᵀ`` with one run of the graph a use."""
    total = None
    for use in [node for node in separated.graph.nodes if "use" in node.meta]:
        objectives = _OneUse(separated, use).run(*tensors)[0]
        block = reference.gramian(objectives, learned)
        total = block if total is None else total + block
    assert total is not None
    return total


@pytest.mark.parametrize("architecture", parameters(CHOSEN, always=6))
def test_separate_uses_do_not_meet(architecture: Architecture) -> None:
    loaded = load(architecture, torch.float64)
    step = gramfx.transform(
        loaded.model, loaded.objective, in_dims=architecture.in_dims, reuse="separate", compile=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoupledObjectivesWarning)
        tensors = step.arguments(*loaded.args, targets=loaded.targets, **loaded.kwargs)
        learned = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]
        want = by_autograd(step.stage("separated").graph_module, tensors, learned)
        _, gramian = step(*loaded.args, targets=loaded.targets, **loaded.kwargs)
    assert reference.relative_error(gramian, want) <= 1e-10


def test_separate_differs_from_exact_where_a_parameter_is_used_twice() -> None:
    (architecture,) = [a for a in ARCHITECTURES if a.name == "parameter_used_twice"]
    loaded = load(architecture, torch.float64)
    both = [gramfx.transform(loaded.model, reuse=r, compile=False)(*loaded.args)[1] for r in ("exact", "separate")]
    assert reference.relative_error(both[1], both[0]) > 1e-3
