"""CUDA kernels without a CUDA device: Inductor's source for the programs of steps, and machine code of all kernels."""

import re
import time
from dataclasses import asdict, dataclass

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gramfx
from gramfx.cli import main
from gramfx.cross import cubins, sources
from gramfx.cuda_compat import CAPABILITIES, Written, has_triton, kernels_of
from gramfx.torch_compat import fake_batch_size, is_symbolic
from tests.architectures import ARCHITECTURES, load

pytestmark = [
    pytest.mark.skipif(not has_triton(), reason="triton, which compiles CUDA kernels, is not installed"),
    # Torch says of itself that nested tensors are a prototype.
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
#: A graph takes seconds to write, a kernel a fifth of one to compile: each kind of layer is here, as small as it comes.
QUICK = ("mlp", "conv_pool_linear", "encoder_layer", "tied_embedding_and_head_tokens")
#: The networks that these layers are of; with random draws, and with samples that are coupled.
WHOLE = ("lstm", "alexnet_reduced", "transformer_small", "encoder_dropout", "batch_norm_2d_training", "weight_norm")
#: Machine code starts with this.
ELF = b"\x7fELF"

#: Kernels that were compiled already in this process, but for their names.
seen: set[tuple[str, int]] = set()


@dataclass(frozen=True)
class Count:
    """Of one step: programs, kernels, those of them that no other step had, and their machine codes."""

    programs: int
    kernels: int
    new: int
    codes: int
    seconds: float


def captured(name: str, *, dynamic: bool = False) -> gramfx.Step:
    """A step of the table, traced and planned."""
    architecture = BY_NAME[name]
    loaded = load(architecture, torch.float32)
    step = gramfx.transform(
        loaded.model, loaded.objective, in_dims=architecture.in_dims, compile=False, dynamic=dynamic or None
    )
    step.trial = False
    return step.capture(*loaded.args, targets=loaded.targets, **loaded.kwargs)


def compiled(written: dict[str, Written], capabilities: tuple[int, ...]) -> Count:
    """Asserts that every kernel compiles for every capability; those that are alike but for their names, once."""
    start, kernels, new, codes = time.perf_counter(), 0, set[str](), 0
    for one in written.values():
        found = kernels_of(one.source)
        kernels += len(found)
        for capability in capabilities:
            fresh = {name: k for name, k in found.items() if (k.replace(name, ""), capability) not in seen}
            seen.update((kernel.replace(name, ""), capability) for name, kernel in fresh.items())
            made = cubins("\n".join(_call(name, kernel) for name, kernel in fresh.items()), capability)
            assert all(code.startswith(ELF) for code in made.values())
            assert set(made) == set(fresh)
            new |= set(fresh)
            codes += len(made)
    return Count(len(written), kernels, len(new), codes, time.perf_counter() - start)


def _call(name: str, kernel: str) -> str:
    return f"async_compile.triton({name!r}, {kernel!r})"


def checked(step: gramfx.Step, capabilities: tuple[int, ...], record: pytest.FixtureRequest) -> dict[str, Written]:
    """Asserts that all programs of a step become kernels; says how many, with ``-s`` for each."""
    start = time.perf_counter()
    written = sources(step, "cuda")
    seconds = time.perf_counter() - start
    count = compiled(written, capabilities)
    # For the summary of the run, also where it is several processes.
    record.node.user_properties.append(("cross", asdict(count)))
    print(f"\n{count}, sources in {seconds:.1f} s")
    assert list(written) == ["objectives and Gramian", "gradient"]
    for one in written.values():
        assert kernels_of(one.source)
        assert "device='cuda:0'" in one.source
        assert one.unrecordable is None
    return written


@pytest.mark.parametrize("name", QUICK)
def test_programs_become_machine_code(name: str, request: pytest.FixtureRequest) -> None:
    """Static, for both architectures."""
    checked(captured(name), CAPABILITIES, request)


@pytest.mark.parametrize("name", ("mlp", "tied_embedding_and_head_tokens"))
def test_a_symbolic_batch_stays_one(name: str, request: pytest.FixtureRequest) -> None:
    """For the newer architecture alone: sizes change indices, which are the same on both."""
    step = captured(name, dynamic=True)
    assert is_symbolic(fake_batch_size(step.lowering.stages["lowered"]))
    written = checked(step, CAPABILITIES[-1:], request)
    for one in written.values():
        # Read off an input; torch 2.14 writes it in another way.
        assert re.search(r"^ +s\d+ = \w+(_size\[0\]|\.size\(\)\[\d\])$", one.source, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the objectives are coupled", "ignore:one capture per batch size")
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "symbolic"))
@pytest.mark.parametrize("name", (*QUICK, *WHOLE))
def test_all_programs_become_machine_code(name: str, dynamic: bool, request: pytest.FixtureRequest) -> None:
    checked(captured(name, dynamic=dynamic), CAPABILITIES, request)


def test_a_recurrent_layer_is_our_own_op(request: pytest.FixtureRequest) -> None:
    """Which runs its kernels one by one between those of Triton."""
    written = checked(captured("lstm"), CAPABILITIES[-1:], request)["objectives and Gramian"]
    assert "torch.ops.gramfx.recurrence_forward.default" in written.source
    assert "torch.ops.gramfx.recurrence_backward.default" in written.source


class Pooled(nn.Module):
    """A linear layer on the rows of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 16), nn.Linear(16, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[samples, 2]``."""
        return torch.nested.to_padded_tensor(torch.tanh(self.first(rows)), 0.0).sum(1) @ self.second.weight.t()


def test_a_ragged_batch_becomes_machine_code(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    rows = torch.nested.nested_tensor([torch.randn(count, 3) for count in (2, 5, 1)], layout=torch.jagged)
    step = gramfx.transform(Pooled(), lambda out: out.square().sum(1), compile=False)
    checked(step.capture(rows), CAPABILITIES, request)


def test_nothing_of_the_device_is_left() -> None:
    """Code for the CPU is written as before."""
    step = captured("mlp")

    def lines() -> list[str]:
        source = sources(step, "cpu")["gradient"].source
        return [line for line in source.splitlines() if not line.startswith("# AOT ID")]

    before = lines()
    sources(step, "cuda")
    assert lines() == before
    assert any("async_compile.cpp" in line for line in before)


LINEAR = ["dump", "torch.nn:Linear(in_features=3, out_features=2)", "-i", "f32[B=4,3]", "--quiet"]


@pytest.mark.parametrize(("device", "written"), (("cpu", "async_compile.cpp"), ("cuda", "async_compile.triton")))
def test_the_command_line_shows_the_source(device: str, written: str) -> None:
    result = CliRunner().invoke(main, [*LINEAR, "--stage", "inductor", "--device", device])
    assert result.exit_code == 0, result.output
    first, second = result.stdout.split("# == gradient\n")
    assert first.startswith("# == objectives and Gramian\n")
    assert written in first and written in second


@pytest.mark.parametrize("more", (["--format", "html"], ["--all-stages"], ["--diff", "joint", "gramian"]))
def test_the_source_is_text_of_one_stage(more: list[str]) -> None:
    result = CliRunner().invoke(main, [*LINEAR, "--stage", "inductor", *more])
    assert result.exit_code == 2
    assert "what Inductor writes is text" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_other_stages_on_cuda_need_a_device() -> None:
    result = CliRunner().invoke(main, [*LINEAR, "--device", "cuda"])
    assert result.exit_code == 2
    assert "there is no CUDA device" in result.stderr


def test_without_triton_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramfx.cross.has_triton", lambda: False)
    result = CliRunner().invoke(main, [*LINEAR, "--stage", "inductor", "--device", "cuda"])
    assert result.exit_code == 2
    assert "pip install triton" in result.stderr
