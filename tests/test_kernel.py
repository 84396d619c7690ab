"""The kernels of ``gramfx::pairwise_gram`` and its kin without a GPU: in triton's interpreter, and compiled for two."""

import multiprocessing
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from gramfx.pairwise_tiles import Tiling, exact_tiling_of, norm_tiling_of, pairs_of, partial_bytes, slots_of, tiling_of
from gramfx.torch_compat import FakeTensorMode
from tests import kernels
from tests.kernels import Case

pytestmark = pytest.mark.skipif(not kernels.HAS_TRITON, reason="triton is not installed: the kernels are written in it")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FEW = settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Calls a function in a process where triton interprets its kernels."""
    before = dict(os.environ)
    os.environ.update(kernels.INTERPRETED)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(os.getpid).result()
        os.environ.clear()
        os.environ.update(before)
        yield lambda function, *args: pool.submit(function, *args).result()


# ---------------------------------------------------------------- against the Jacobian in float64

sizes = st.integers(1, 5)
tokens = st.sampled_from([1, 2, 3, 5, 8, 16, 31, 64, 66])
ids = st.sampled_from([(0, -1), (3, -1), (4, 1)])


def cases(**changed: Any) -> st.SearchStrategy[Case]:
    """Any small sizes, odd ones and ones among them."""
    choices = {
        "samples": sizes,
        "tokens": tokens,
        "inputs": sizes,
        "outputs": st.integers(1, 18),
        "dtype": st.sampled_from(FLOATS),
        "masked": st.booleans(),
        "seed": st.integers(0, 99),
    }
    return st.builds(Case, **{**choices, **changed})


@FEW
@given(case=cases(), classes=ids)
def test_gramian_and_norms(run: Run, case: Case, classes: tuple[int, int]) -> None:
    check(run, Case(**{**vars(case), "classes": classes[0], "ignored": classes[1]}))


@FEW
@given(case=cases(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any).map(tuple)), classes=ids)
def test_ragged(run: Run, case: Case, classes: tuple[int, int]) -> None:
    check(run, Case(**{**vars(case), "classes": classes[0], "ignored": classes[1]}))


PICKED = {
    "one row": Case(1, 1, 1, 1),
    "a sample larger than tiles": Case(2, 130, 3, 2),
    "tiles inside samples": Case(2, 128, 2, 2),
    "tiles that hold whole samples": Case(9, 16, 2, 2),
    "more tiles than a square": Case(28, 19, 2, 2),
    "many short samples": Case(19, 0, 2, 2, lengths=(1, 0, 2) * 6 + (70,)),
    "samples without rows at both ends": Case(5, 0, 2, 2, lengths=(0, 0, 3, 0, 0)),
    "tokens first": Case(3, 5, 16, 32, layout="tokens first"),
    "the same for all samples": Case(3, 5, 16, 16, layout="the same for all samples"),
    "every second number": Case(3, 5, 16, 16, layout="every second number"),
}
SLOW = dict.fromkeys(["more tiles than a square", "many short samples"], pytest.mark.slow)


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in PICKED])
def test_picked(run: Run, name: str) -> None:
    check(run, PICKED[name])


def check(run: Run, case: Case) -> None:
    gram, norms, symmetric = run(kernels.interpreted, case)
    assert gram <= 1
    assert norms <= 1
    assert symmetric


@FEW
@given(case=cases(classes=st.integers(1, 5), tokens=st.integers(1, 9)), heads=st.integers(1, 70))
def test_gathered(run: Run, case: Case, heads: int) -> None:
    assert run(kernels.interpreted_gathered, case, heads) <= 1


# ---------------------------------------------------------------- the guard


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tokens_that_cancel(run: Run, dtype: torch.dtype) -> None:
    """Without the guard, rounding is all that is left of the gradients; float64 takes them to float32's last digits."""
    apart = 1e-4 if dtype == torch.float32 else 2**-9
    without = run(kernels.interpreted_cancelling, apart, dtype, False)
    assert dtype != torch.float32 or min(without) > 1e-2
    assert max(run(kernels.interpreted_cancelling, apart, dtype, True)) <= 2 * torch.finfo(torch.float32).eps


def test_the_guard_leaves_the_rest_alone(run: Run) -> None:
    assert not run(kernels.guard_changes, Case(4, 24, 8, 8))


# ---------------------------------------------------------------- compiled for GPUs that are not there

POINTERS = {
    "ids": "*i64",
    "offsets": "*i64",
    "owners": "*i32",
    "starts": "*i32",
    "first_tiles": "*i32",
    "last_tiles": "*i32",
}
FACTORS = {"act", "cot", "left", "head", "right"}
SUMS = {"partial", "magnitude", "gram", "gram_out", "total", "squares"}
NOT_ALIGNED = {"count", "tokens", "tile_count", "samples", "ignored", "reach", "right_tiles"}


def resources(
    kernel: Any, capability: int, dtype: str, constants: dict[str, Any], warps: int, stages: int
) -> tuple[int, int]:
    """Registers of a thread and bytes that it spills, by the compiled code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, aligned = {}, {}
    for number, name in enumerate(kernel.arg_names):
        kind = "*" + dtype if name in FACTORS else "*fp32" if name in SUMS else POINTERS.get(name, "i32")
        kind = "constexpr" if name in constants else "fp32" if name == "limit" else kind
        signature[name] = kind
        if kind.startswith("*") or (
            kind == "i32" and not name.endswith(("tokens", "count")) and name not in NOT_ALIGNED
        ):
            aligned[number,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return usage(tool, code)


def usage(tool: Path, code: bytes) -> tuple[int, int]:
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "one.cubin"
    path.write_bytes(code)
    said = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2]) + int(found[3])


@pytest.fixture
def no_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton warns of a default that will change, whatever is compiled."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


PRODUCTS = {
    "bfloat16": (torch.bfloat16, "ieee", "bf16"),
    "float16": (torch.float16, "ieee", "fp16"),
    "float32 as tf32": (torch.float32, "tf32", "fp32"),
    "float32 as tf32x3": (torch.float32, "tf32x3", "fp32"),
    "float32": (torch.float32, "ieee", "fp32"),
}
COMMON = ["bfloat16-50", "float32 as tf32x3-50"]
TILES = [
    pytest.param(name, many, marks=() if f"{name}-{many}" in COMMON else pytest.mark.slow, id=f"{name}-{many}")
    for name in PRODUCTS
    for many in (3, 8, 50, 64, 77, 256)
]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("name", "many"), TILES)
@pytest.mark.usefixtures("no_warning")
def test_tiles_fit_in_registers(name: str, many: int, capability: int) -> None:
    from gramfx.pairwise_kernels import tiles

    dtype, precision, spelled = PRODUCTS[name]
    tiling = tiling_of(dtype, precision, many)
    slots, whole = slots_of(many, tiling.rows)
    plain = {"owners": None, "starts": None, "ONE_HOT": False, "RAGGED": False, "TOKENS": whole, "SLOTS": slots}
    fits(tiles, tiling, precision, spelled, plain, capability)


def fits(kernel: Any, tiling: Tiling, precision: str, spelled: str, constants: dict[str, Any], capability: int) -> None:
    launch = tiling.launches[0]
    shared = {"ROWS": tiling.rows, "INNER": launch.inner, "PRECISION": precision, "UPCAST": False}
    constants = {**constants, **{name: shared[name] for name in shared if name in kernel.arg_names}}
    registers, spilled = resources(kernel, capability, spelled, constants, launch.warps, launch.stages)
    print(f"{kernel.__name__}: {registers} registers, {spilled} bytes spilled")
    assert spilled == 0


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.usefixtures("no_warning")
def test_other_kernels_fit_in_registers(name: str, capability: int) -> None:
    from gramfx import pairwise_kernels, pairwise_mend

    dtype, precision, spelled = PRODUCTS[name]
    tiling = tiling_of(dtype, precision, 50)
    given = (precision, spelled)
    ragged = {"ONE_HOT": False, "RAGGED": True, "TOKENS": 0, "SLOTS": 8}
    fits(pairwise_kernels.tiles, tiling, *given, ragged, capability)
    for many in (5, 50, 200):
        norms = {"offsets": None, "ONE_HOT": False, "RAGGED": False}
        fits(
            pairwise_kernels.norm_tiles,
            norm_tiling_of(dtype, precision, many),
            *given,
            norms,
            capability,
        )
    fits(pairwise_kernels.gathered_tiles, tiling, *given, {"SLOTS": 4}, capability)
    for many in (5, 50):
        exact = exact_tiling_of(many)
        for samples in ({"offsets": None, "RAGGED": False}, {"RAGGED": True}):
            mend = {**samples, "ONE_HOT": False, "DIAGONAL": False, "BLOCK": 4}
            fits(pairwise_mend.mend, exact, *given, mend, capability)
        fits(pairwise_mend.mend_gathered, exact, *given, {"BLOCK": 4}, capability)
    nothing = dict.fromkeys(("owners", "starts", "first_tiles", "last_tiles"))
    fold = {**nothing, "RAGGED": False, "SYMMETRIC": True, "SLOTS": 4, "ROWS": tiling.rows, "BLOCK": 16}
    assert resources(pairwise_kernels.fold, capability, spelled, fold, 4, 3)[1] == 0


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("many", [1, 8, 50, 77, 197])
def test_workspace(many: int) -> None:
    """Beside the result: as much for sizes, sums of a tile by pairs of samples, and nothing by pairs of tokens."""
    from gramfx.pairwise_launch import gram_on_gpu

    samples, width = 256, 32
    with FakeTensorMode():
        act = torch.empty(samples, many, width, device="cuda", dtype=torch.bfloat16)
        graph = make_fx(lambda a, c: gram_on_gpu(a, c, None, 0, -1, "ieee"))(act, act.clone()).graph
    launched = [node for node in graph.nodes if "triton" in str(node.target)]
    assert len(launched) == 3
    made = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload) and not node.target.is_view]
    values = [node.meta["val"] for node in made]
    used = sum(one.numel() * one.element_size() for one in values if one.numel() > samples)
    rows = tiling_of(act.dtype, "ieee", many).rows
    slots, _ = slots_of(many, rows)
    tiles = samples * many // rows
    partial = 2 * 4 * pairs_of(tiles) * slots**2
    assert used == 2 * 4 * samples**2 + partial
    assert partial <= (1 + 1 / tiles) * partial_bytes(samples, many, rows)
    assert many == 1 or used < 4 * samples**2 * many**2
