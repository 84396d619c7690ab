"""What the device does in a second: measured once, kept in the user's cache directory."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gramfx.errors import InputError

#: The dtypes that contractions accumulate in.
ACCUMULATED = (torch.float32, torch.float64)
#: Those that fused ops multiply in besides.
HALVES = (torch.bfloat16, torch.float16)
_DEFAULT_CACHE = 16 * 2**20


@dataclass(frozen=True)
class Machine:
    """A device as the planner sees it.

    ``flops``: floating-point operations a second of a matrix product, by dtype name. ``bandwidth``: bytes a second of
    tensors too large for the cache, ``cached_bandwidth`` of those that fit. ``latency``: seconds an operation takes
    however small. ``cache``: bytes. ``half``: the extent of a matrix product at which it runs at half the full rate
    (R. Hockney's n½).
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    bandwidth: float
    cached_bandwidth: float
    latency: float
    cache: int
    half: int

    def rate(self, dtype: torch.dtype) -> float:
        """Operations a second in ``dtype``; those in float32 where nothing is known."""
        return self.flops.get(_name(dtype), self.flops["float32"])

    @property
    def balance(self) -> int:
        """Multiply-adds in float32 that take as long as writing one number."""
        return max(1, round(self.rate(torch.float32) / 2 * 4 / self.bandwidth))


def machine_of(device: torch.device) -> Machine:
    """The device's description: from the cache directory, else measured now and kept there.

    The directory is ``$GRAMFX_CACHE_DIR``, else ``gramfx`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; one that cannot be
    written is no error. A JSON file of a :class:`Machine`'s fields named by ``$GRAMFX_MACHINE`` goes before all.
    """
    given = os.environ.get("GRAMFX_MACHINE")
    return _given(given) if given else _machine(device.type, device.index or 0)


@functools.lru_cache
def _given(path: str) -> Machine:
    try:
        return Machine(**json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError) as problem:
        raise InputError(
            "GRAMFX_MACHINE names no description of a machine",
            expected="a JSON file with " + ", ".join(field.name for field in dataclasses.fields(Machine)),
            got=f"{path}: {problem}",
        ) from problem


@functools.lru_cache
def _machine(kind: str, index: int) -> Machine:
    device = torch.device(kind, index) if kind != "cpu" else torch.device("cpu")
    name = _device_name(device)
    path = cache_directory() / "machines.json"
    known = _read(path)
    if name in known:
        return Machine(**known[name])
    machine = measured(device)
    _write(path, {**known, name: dataclasses.asdict(machine)})
    return machine


def cache_directory() -> Path:
    """Where what was measured is kept."""
    given = os.environ.get("GRAMFX_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(base) / "gramfx"


def _read(path: Path) -> dict[str, Any]:
    """What is known in the form of this version."""
    names = {field.name for field in dataclasses.fields(Machine)}
    try:
        return {name: held for name, held in json.loads(path.read_text()).items() if set(held) == names}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write(path: Path, known: Mapping[str, object]) -> None:
    """Whole or not at all, since other processes read it."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known, indent=1))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)


def _device_name(device: torch.device) -> str:
    """Of the device and all that changes its speed."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()} {platform.processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def measured(device: torch.device) -> Machine:
    """Measure a device: matrix products, an addition of large tensors, an addition of small ones."""
    size = 512 if device.type == "cpu" else 4096
    flops = {}
    for dtype in ACCUMULATED if device.type == "cpu" else (*ACCUMULATED, *HALVES):
        square = torch.ones(size, size, dtype=dtype, device=device)
        flops[_name(dtype)] = 2 * size**3 / _least_seconds(functools.partial(torch.mm, square, square), device)
    cache = cache_size(device)
    bandwidth, cached = (_bandwidth(count, device) for count in (max(2**24, cache), cache // 32))
    cached = max(cached, bandwidth)
    small = torch.ones(1, 8, 8, device=device)
    latency = _least_seconds(lambda: small @ small.transpose(1, 2), device, repeat=100)
    return Machine(_device_name(device), flops, bandwidth, cached, latency, cache, _half(flops["float32"], device))


def _half(full: float, device: torch.device) -> int:
    """From the rate of a product with narrow results, long enough for its latency not to count."""
    narrow, long = 16, 2**13
    one = torch.ones(narrow, long, dtype=torch.float32, device=device)
    rate = 2 * narrow**2 * long / _least_seconds(functools.partial(torch.mm, one, one.t()), device, repeat=20)
    return max(1, round(narrow * (full / rate - 1)))


def _bandwidth(count: int, device: torch.device) -> float:
    """Bytes a second of an addition of float32 tensors."""
    one = torch.ones(count, dtype=torch.float32, device=device)
    return 12 * count / _least_seconds(functools.partial(torch.add, one, one), device, repeat=10)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cache_size(device: torch.device) -> int:
    """Bytes of the last cache before the device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    names = ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE")
    found = [os.sysconf(name) for name in names if name in getattr(os, "sysconf_names", {})]
    return next((size for size in found if size > 0), _DEFAULT_CACHE)


def _least_seconds(run: Callable[[], object], device: torch.device, repeat: int = 1) -> float:
    """The fastest of a few runs: what else the machine does only ever adds to it."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(repeat):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) / repeat)
    return min(times[1:])
