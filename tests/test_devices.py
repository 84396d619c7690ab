"""What a step does on another device than the CPU: where its tensors are, what it reads, what it counts as memory."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramfx
from gramfx.cross import programs
from gramfx.cuda_compat import has_triton, on_cuda, pretended
from gramfx.devices import allocated, cuda_devices, reproducible
from gramfx.graph import placeholders
from gramfx.memory import nbytes, profile
from gramfx.ragged import refuse_holes
from gramfx.torch_compat import pytree
from tests.architectures import ARCHITECTURES, Architecture, load, parameters

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

#: Models with tensors of their own on the CPU, and one whose lengths torch wants there.
AT_HOME = ("parameter_broadcast_by_sum", "samples_permuted", "info_nce", "gru_packed_and_unpacked")
#: Each makes index tensors, draws, or an op of ours; others are a sample of the table.
NAMES = ("lstm", "encoder_dropout", "embedding_bag_offsets", "view_diag_embed", "batch_norm_training", "weight_norm")
CHOSEN = [
    architecture
    for index, architecture in enumerate(ARCHITECTURES)
    if (index % 20 == 0 or architecture.name in NAMES) and not architecture.slow and architecture.name not in AT_HOME
]


@pytest.mark.parametrize("architecture", parameters(CHOSEN))
def test_a_step_stays_on_its_device_and_reads_nothing(architecture: Architecture) -> None:
    """On tensors without numbers, in place of a GPU's: what is made on the CPU is seen, what reads a number raises."""
    loaded = load(architecture, architecture.dtypes[0], "meta")
    step = gramfx.transform(loaded.model, loaded.objective, in_dims=architecture.in_dims, compile=False)
    step.trial = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gramfx.errors.CoupledObjectivesWarning)
        objectives, gramian = step(*loaded.args, targets=loaded.targets, **loaded.kwargs)
    objectives.backward(torch.ones_like(objectives))
    assert gramian.shape == (objectives.numel(),) * 2
    assert {one.device.type for one in (objectives, gramian)} == {"meta"}
    for graph_module in (*step.lowering.stages.values(), *programs(step).values()):
        for node in graph_module.graph.nodes:
            leaves = [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
            # A single number may be on the CPU: ops take it along.
            assert all(leaf.device.type == "meta" or not leaf.dim() for leaf in leaves), node


def test_offsets_of_a_ragged_batch_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.nested.nested_tensor([torch.randn(count, 3) for count in (2, 5, 1)], layout=torch.jagged)
    read = list[str]()

    def told(name: str) -> None:
        plain = getattr(Tensor, name)

        def call(tensor: Tensor, *args: Any) -> Any:
            read.append(name)
            return plain(tensor, *args)

        monkeypatch.setattr(Tensor, name, call)

    for name in ("tolist", "item", "__int__", "__bool__", "__index__"):
        told(name)
    parts = refuse_holes(rows)
    assert (parts.shortest, parts.longest) == (1, 5)
    assert read == ["tolist"]


# ---------------------------------------------------------------- memory


def test_the_allocator_gives_out_blocks() -> None:
    assert [allocated(size, CUDA) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert allocated(513, CPU) == 513


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_memory_on_cuda_is_counted_in_blocks() -> None:
    step = gramfx.transform(nn.Linear(3, 2), lambda out: out.sum(1), compile=False)
    step.trial = False
    lowered = step.capture(torch.randn(5, 3)).stage("lowered").graph_module
    with pretended(90):
        moved = on_cuda(lowered)
    assert {node.meta["val"].device for node in placeholders(moved)} == {CUDA}
    assert [nbytes((node, 0), 5) for node in placeholders(moved)] == [512] * 3
    ours, theirs = profile(moved, 5), profile(lowered, 5)
    assert all(size % 512 == 0 for size in ours.during.values())
    assert len(ours.during) == len(theirs.during)
    assert ours.peak > theirs.peak


# ---------------------------------------------------------------- trials


def precisions() -> list[str]:
    """Of float32 products, where they can be less than full."""
    cudnn: Any = torch.backends.cudnn
    places: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    return [place.fp32_precision for place in places]


def test_trials_on_cuda_are_in_full_float32_and_by_the_reference_path(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = list[list[torch.device]]()

    @contextlib.contextmanager
    def forked(devices: list[torch.device]):  # type: ignore[no-untyped-def]
        entered.append(devices)
        yield

    monkeypatch.setattr(torch.random, "fork_rng", forked)
    before, fused = precisions(), torch.backends.cuda.flash_sdp_enabled()
    with reproducible([CUDA]):
        assert set(precisions()) == {"ieee"}
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    assert (precisions(), torch.backends.cuda.flash_sdp_enabled()) == (before, fused)
    with reproducible([]):
        assert precisions() == before
        assert torch.backends.cuda.flash_sdp_enabled() == fused
    assert entered == [[CUDA], []]


def test_devices_are_those_of_all_tensors() -> None:
    class Fake:
        device = CUDA

    assert cuda_devices([torch.ones(1), Fake(), Fake()]) == [CUDA]  # type: ignore[list-item]


def test_attention_is_written_out() -> None:
    """No op of a fused kernel of the device that a graph was captured on is left in it."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    step = gramfx.transform(model, lambda out: out.square().sum((1, 2)), compile=False)
    step.trial = False
    for graph_module in programs(step.capture(torch.randn(4, 3, 8))).values():
        assert not any("scaled_dot_product" in str(node.target) for node in graph_module.graph.nodes)


# Of torch's, at the import.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_cuda_graphs_of_inductor_stay_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would overwrite what a step returned by what the next one returns."""
    from torch._inductor import compile_fx

    given = list[dict[str, object]]()
    monkeypatch.setattr(compile_fx, "compile_fx", lambda *_, config_patches: given.append(config_patches))
    step = gramfx.transform(nn.Linear(3, 2), lambda out: out.sum(1))
    step.trial = False
    step.capture(torch.randn(5, 3))
    assert given == [{"triton.cudagraphs": False}]
