"""Models inside ``DistributedDataParallel``: the Gramian is that of this process's samples, gradients are averaged.

A wrapper averages gradients in hooks that a graph does not have. Its backward gives every process the mean over all of
what ``.grad`` holds afterwards, once for each backward; so does ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from gramfx.errors import UnsupportedError
from gramfx.torch_compat import at_end_of_backward, current_backward, does_more_than_average, synchronise_buffers


def wrappers_of(program: nn.Module) -> list[tuple[str, DistributedDataParallel]]:
    """The wrappers in a program, by name. Raises :class:`UnsupportedError` for those that do more than averaging."""
    found = []
    for name, module in program.named_modules():
        more = isinstance(module, DistributedDataParallel) and does_more_than_average(module)
        if more or isinstance(module, DataParallel):
            raise UnsupportedError(
                f"{type(module).__name__} {'changes gradients on the way' if more else 'runs copies of the model'}",
                expected="DistributedDataParallel without communication hooks and mixed precision",
                where=f"module {name!r}",
                remedy="transform the wrapped module, its attribute .module",
            )
        if isinstance(module, DistributedDataParallel):
            found.append((name, module))
    return found


@contextlib.contextmanager
def wrappers_passed() -> Iterator[None]:
    """Let wrappers call what they wrap and do nothing else."""
    with mock.patch.object(
        DistributedDataParallel, "forward", lambda self, *args, **kwargs: self.module(*args, **kwargs)
    ):
        yield


class Averaging:
    """What one call owes to its wrappers: buffers alike before it, and gradients averaged by its backward."""

    def __init__(self, program: nn.Module) -> None:
        self.groups: dict[int, dist.ProcessGroup] = {}
        running = dist.is_available() and dist.is_initialized()
        for _, wrapper in wrappers_of(program) if running else ():
            synchronise_buffers(wrapper)
            if torch.is_grad_enabled() and wrapper.require_backward_grad_sync:
                self.groups |= {id(parameter): wrapper.process_group for parameter in wrapper.parameters()}

    def after_backward(self, leaves: Sequence[Tensor]) -> None:
        """Called within a backward: let ``.grad`` of these leaves be its mean over all processes once it is there.

        That is, with what was accumulated under ``no_sync()``, and nothing where gradients are asked for otherwise.
        Each leaf is owed one mean for the call, and gets it in the first backward that accumulates into it.
        """
        now = current_backward()
        for leaf in leaves:
            if id(leaf) in self.groups:
                hook = leaf.register_post_accumulate_grad_hook(lambda done: self._average(done, now))
                at_end_of_backward(hook.remove)

    def _average(self, leaf: Tensor, backward: int) -> None:
        # A backward that failed has left its hooks behind.
        if backward != current_backward() or id(leaf) not in self.groups:
            return
        group = self.groups.pop(id(leaf))
        assert leaf.grad is not None
        total = leaf.grad.contiguous()
        dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total, group=group)
        leaf.grad.copy_(total.div_(dist.get_world_size(group)))
