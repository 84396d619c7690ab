"""Inside ``DistributedDataParallel``: each process's own Gramian, and gradients as the wrapper's own backward gives."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import gramfx
from gramfx.errors import UnsupportedError
from tests import reference

PROCESSES = 2


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layers = (nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False).eval(), nn.Tanh(), nn.Linear(5, 2))
    return DistributedDataParallel(nn.Sequential(*layers).double())


def losses(output: Tensor) -> Tensor:
    return output.square().sum(1)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([reference.flat(p.grad, p) for p in reference.trainable(model)])


def compare(rank: int, folder: str) -> None:
    """A step accumulated without synchronisation, then two with it, by the wrapper's backward and by ours."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    plain, ours = network(), network()
    step = gramfx.transform(ours, losses, compile=False)
    torch.manual_seed(rank)
    for number in range(3):
        source = torch.randn(3, 4, dtype=torch.float64)
        weights = torch.randn(3, dtype=torch.float64)
        alone = number == 0
        with plain.no_sync() if alone else contextlib.nullcontext():
            (losses(plain(source)) * weights).sum().backward()
        with ours.no_sync() if alone else contextlib.nullcontext():
            objectives, gramian = step(source)
            objectives.backward(weights)
        jacobian = reference.jacobian(losses(ours.module(source)), reference.trainable(ours))
        assert reference.relative_error(gramian, jacobian @ jacobian.T) <= 1e-12
        assert reference.relative_error(gradients(ours), gradients(plain)) <= 1e-12
    for model, objective in ((plain, losses(plain(source))), (ours, step(source)[0])):
        model.zero_grad()
        # Gradients that are only asked for settle nothing.
        torch.autograd.grad(objective.sum(), list(model.parameters()), retain_graph=True)
        objective.sum().backward()
    assert reference.relative_error(gradients(ours), gradients(plain)) <= 1e-12
    assert step.captures == 1
    found = [torch.empty_like(gradients(ours)) for _ in range(PROCESSES)]
    dist.all_gather(found, gradients(ours))
    assert torch.equal(*found)
    Path(folder, str(rank)).touch()
    dist.barrier()
    # At once: where both processes take their groups down together, one may wait for the other for ever.
    os._exit(0)


def test_two_processes_average_as_the_wrapper_does(tmp_path: Path) -> None:
    spawn(compare, (str(tmp_path),), nprocs=PROCESSES)
    assert all((tmp_path / str(rank)).exists() for rank in range(PROCESSES))


def test_what_does_more_is_refused() -> None:
    model = nn.DataParallel(nn.Linear(3, 2))
    with pytest.raises(UnsupportedError, match="copies of the model") as raised:
        gramfx.transform(model, losses, compile=False)(torch.randn(4, 3))
    assert raised.value.remedy
