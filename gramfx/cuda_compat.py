"""CUDA code without a CUDA device: what is private to torch and triton there. Checked with torch 2.13 and 2.14.

A sibling of :mod:`gramfx.torch_compat`, for tests and for reading; nothing here runs when a model does.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from gramfx.torch_compat import compile_graph, fake_mode_of

#: What ``torch.cuda.get_device_properties`` would say: an A100 and an H100, by compute capability.
_PROPERTIES: dict[int, dict[str, Any]] = {
    80: {"name": "A100", "multi_processor_count": 108, "shared_memory_per_block_optin": 163 * 2**10},
    90: {"name": "H100", "multi_processor_count": 132, "shared_memory_per_block_optin": 227 * 2**10},
}
_COMMON = {
    **{"minor": 0, "warp_size": 32, "max_threads_per_block": 1024, "max_threads_per_multi_processor": 2048},
    **{"regs_per_multiprocessor": 65536, "L2_cache_size": 40 * 2**20, "total_memory": 80 * 2**30, "gcnArchName": ""},
}
CAPABILITIES = tuple(_PROPERTIES)


def has_triton() -> bool:
    """Whether the package that Inductor writes CUDA kernels for is installed."""
    return find_spec("triton") is not None


# ---------------------------------------------------------------- a device that is not there


@contextlib.contextmanager
def pretended(capability: int) -> Iterator[None]:
    """Let torch and triton believe in one CUDA device, as far as writing code for it asks.

    Outside, both are as before: what they remembered of the device is forgotten.
    """
    import torch._inductor.config as config
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers
    from triton.runtime import driver

    properties = SimpleNamespace(major=capability // 10, **_COMMON, **_PROPERTIES[capability])
    patterns = functools.partial(joint_graph.lazy_init, torch.device("cpu"))
    with _guarded(), contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", _driver(capability)))
        for name, answer in _answers(properties).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(CudaInterface, "get_device_properties", lambda device=None: properties))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        # Inductor traces its patterns on small tensors of the device; those of the CPU give the same.
        stack.enter_context(mock.patch.object(joint_graph, "lazy_init", lambda device=None: patterns()))
        # Whether padding a product pays is found out by running it, and so are the values of constants.
        stack.enter_context(config.patch(shape_padding=False, joint_graph_constant_folding=False))
        _forget()
        try:
            yield
        finally:
            _forget()


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Let calls from Python with fake CUDA tensors find the guard that keeps track of the current device.

    Builds for CUDA have one that does nothing where there is no device; builds for the CPU have none, and borrow
    the CPU's, which does nothing either.
    """
    torch._C._ensureCUDADeviceGuardSet()
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    # By c10::DeviceType: the CPU is 0, CUDA is 1.
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[1]
    guards[1] = before or guards[0]
    try:
        yield
    finally:
        guards[1] = before


def _answers(properties: SimpleNamespace) -> dict[str, Callable[..., Any]]:
    """What functions of ``torch.cuda`` say of a device."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }


def _driver(capability: int) -> Any:
    """A driver of triton's that answers what compiling asks, and launches nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    answers = {
        "is_active": classmethod(lambda cls: True),
        "get_current_target": lambda self: GPUTarget("cuda", capability, 32),
        "get_active_torch_device": lambda self: torch.device("cuda", 0),
        "get_current_device": lambda self: 0,
        "get_current_stream": lambda self, device=None: 0,
        "map_python_to_cpp_type": lambda self, kind: kind,
        "get_benchmarker": lambda self: None,
    }
    return type("Pretended", (DriverBase,), answers)()


def _forget() -> None:
    """Empty the caches that hold whether there is a device, and which."""
    import torch._inductor.utils as inductor
    import torch.utils._triton as triton
    from torch._inductor.codecache import CacheBase
    from torch._inductor.runtime.hints import DeviceProperties

    for module in (inductor, triton):
        for held in vars(module).values():
            if getattr(held, "__module__", None) == module.__name__ and hasattr(held, "cache_clear"):
                held.cache_clear()
    CacheBase.get_system.cache_clear()
    DeviceProperties.create.cache_clear()


# ---------------------------------------------------------------- graphs


def on_cuda(graph_module: GraphModule) -> GraphModule:
    """A copy of a graph traced on the CPU, its values fake tensors on CUDA; a symbolic batch stays one.

    Differentiating fake CUDA tensors ends a process of the CPU build, so a graph is traced on the CPU and moved then.
    """
    device = torch.device("cuda", 0)
    moved = copy.deepcopy(graph_module)
    for node in moved.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": device}
    moved.recompile()
    mode = fake_mode_of(graph_module)
    given = [node.meta["val"] for node in moved.graph.nodes if node.op == "placeholder"]
    with mode, torch.no_grad():
        fakes = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device)
            if isinstance(one, Tensor)
            else one
            for one in given
        ]
        FakeTensorProp(moved, mode).propagate(*fakes)
    return moved


@dataclass(frozen=True)
class Written:
    """What Inductor wrote for a graph. ``unrecordable``: why a CUDA graph could not record it, if so."""

    source: str
    unrecordable: str | None


def written(graph_module: GraphModule, *, random: bool) -> Written:
    """What Inductor writes for a graph, for the device that it is on; nothing is compiled or run."""
    import torch._inductor.config as config
    from torch._inductor.cudagraph_utils import check_multiple_devices_or_any_cpu_nodes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node

    found: list[Written] = []

    def write(lowering: Any) -> Any:
        source: str = lowering.codegen()[0].value
        refused = [str(node.target) for node in lowering.module.graph.nodes if is_cudagraph_unsafe_fx_node(node)]
        devices = check_multiple_devices_or_any_cpu_nodes(dict(lowering.device_node_mapping))
        found.append(Written(source, lowering.disable_cudagraphs_reason or devices or next(iter(refused), None)))
        return SimpleNamespace(call=None)

    # Without caches, in which what is not compiled here would be found.
    uncached = config.patch(force_disable_caches=True, compile_threads=1)
    with uncached, mock.patch.object(GraphLowering, "compile_to_module", write):
        compile_graph(graph_module, random=random)
    (only,) = found
    return only


# ---------------------------------------------------------------- kernels


def kernels_of(source: str) -> dict[str, str]:
    """The Triton kernels in what Inductor wrote: their source by name."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [call for call in calls if ast.unparse(call.func) == "async_compile.triton"]
    return {ast.literal_eval(call.args[0]): ast.literal_eval(call.args[1]) for call in made}


def cubin(name: str, source: str, capability: int) -> bytes:
    """A kernel as machine code for a compute capability, in the first of the ways that Inductor would try."""
    import triton
    from torch._inductor.codecache import PyCodeCache
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tuner = getattr(PyCodeCache.load(source), name)
    first = tuner.configs[0]
    meta = {**tuner._create_compile_meta(first), "cc": capability}
    options = tuner._create_compile_options(first, meta)
    made = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    compiled = triton.compile(made, target=GPUTarget("cuda", capability, 32), options=options)
    code: bytes = compiled.asm["cubin"]
    return code
