"""Gramians by pairs of tokens as ops: in ATen, and as torch's tools see them."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gramfx import pairwise_aten
from gramfx.pairwise import PAIRWISE_GATHERED, PAIRWISE_GRAM, PAIRWISE_NORMS
from tests.kernels import Case, by_jacobian

# ---------------------------------------------------------------- in ATen

ragged = st.lists(st.integers(0, 5), min_size=1, max_size=5).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    case=st.builds(
        Case,
        samples=st.integers(0, 4),
        tokens=st.integers(0, 9),
        inputs=st.integers(1, 4),
        outputs=st.integers(1, 4),
        dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
        lengths=st.just(()) | ragged,
        classes=st.integers(0, 4),
        ignored=st.integers(-1, 1),
        masked=st.booleans(),
        layout=st.sampled_from(["rows", "every second number"]),
        seed=st.integers(0, 99),
    )
)
def test_in_aten(case: Case) -> None:
    act, cot = case.factors()
    want, _ = by_jacobian(case, act, cot)
    gram, norms = (op(act, cot, case.offsets, case.longest, case.ignored) for op in (PAIRWISE_GRAM, PAIRWISE_NORMS))
    assert gram.dtype == norms.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    tolerance = 2 * torch.finfo(gram.dtype).eps * max(1, case.tokens)
    torch.testing.assert_close(gram.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().sum()))
    torch.testing.assert_close(norms.double(), want.diagonal(), rtol=tolerance, atol=tolerance)


class Largest(TorchDispatchMode):
    """Remembers how many bytes the largest tensor has that is made."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.nbytes = max(self.nbytes, made.numel() * made.element_size())
        return made


def test_nothing_by_pairs_of_tokens_in_aten() -> None:
    act, cot = torch.randn(20, 300, 2), torch.randn(20, 300, 3)
    with Largest() as largest:
        pairwise_aten.gram(act, cot, -1)
    assert largest.nbytes <= 8 * pairwise_aten.MOST
    assert largest.nbytes < 8 * (20 * 300) ** 2 / 30


# ---------------------------------------------------------------- as torch's tools see it

IDS = torch.tensor([[0, 1, 1, 3], [2, 2, 0, 1], [3, 0, 1, 2]])
OFFSETS = torch.tensor([0, 2, 2, 7])
GIVEN = {
    "dense": (PAIRWISE_GRAM, (torch.randn(3, 4, 5), torch.randn(3, 4, 6))),
    "ids": (PAIRWISE_GRAM, (IDS, torch.randn(3, 4, 6))),
    "ragged": (PAIRWISE_GRAM, (torch.randn(7, 5), torch.randn(7, 6), OFFSETS, 5)),
    "norms": (PAIRWISE_NORMS, (torch.randn(3, 4, 5), torch.randn(3, 4, 6))),
    "ragged norms": (PAIRWISE_NORMS, (torch.randn(7, 5), torch.randn(7, 6), OFFSETS, 5)),
    "gathered": (
        PAIRWISE_GATHERED,
        (IDS, torch.randn(3, 4, 2), torch.randn(3, 5, 4), torch.randn(3, 5, 2), torch.ones(3)),
    ),
}
FLOPS = {
    "dense": 12 * 13 * 11,
    "ids": 12 * 13 * 6,
    "ragged": 7 * 8 * 11,
    "norms": 3 * 4 * 5 * 11,
    "ragged norms": 3 * 5 * 6 * 11,
    "gathered": 2 * 12 * 15 * 2,
}


@pytest.mark.parametrize("name", GIVEN)
def test_the_op_is_registered_well(name: str) -> None:
    torch.library.opcheck(*GIVEN[name])


@pytest.mark.parametrize("name", GIVEN)
def test_flops(name: str) -> None:
    op, args = GIVEN[name]
    with FlopCounterMode(display=False) as counted:
        op(*args)
    assert counted.get_total_flops() == FLOPS[name]


def doubled(act: Tensor, cot: Tensor) -> Tensor:
    return 2 * PAIRWISE_GRAM(act, cot)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("before", [False, True])
def test_one_node_when_traced(mode: Literal["real", "symbolic"], before: bool) -> None:
    graph = make_fx(doubled, tracing_mode=mode, pre_dispatch=before)(*GIVEN["dense"][1]).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        PAIRWISE_GRAM,
        torch.ops.aten.mul.Tensor,
    ]


def test_one_node_when_exported() -> None:
    class Doubled(nn.Module):
        def forward(self, act: Tensor, cot: Tensor) -> Tensor:
            return doubled(act, cot)

    samples = torch.export.Dim("samples")
    exported = torch.export.export(Doubled(), GIVEN["dense"][1], dynamic_shapes=({0: samples}, {0: samples}))
    assert PAIRWISE_GRAM in [node.target for node in exported.graph.nodes]
    act, cot = torch.randn(5, 4, 5), torch.randn(5, 4, 6)
    torch.testing.assert_close(exported.module()(act, cot), doubled(act, cot))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(doubled, dynamic=dynamic, fullgraph=True)
    for samples in (3, 5):
        act, cot = torch.randn(samples, 4, 5), torch.randn(samples, 4, 6)
        torch.testing.assert_close(compiled(act, cot), doubled(act, cot))


def test_triton_is_not_needed() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch, gramfx
from gramfx.pairwise import PAIRWISE_GRAM
print(PAIRWISE_GRAM(torch.ones(2, 3, 4), torch.ones(2, 3, 5)).tolist())
"""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[180.0, 180.0], [180.0, 180.0]]"
