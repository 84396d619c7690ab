"""A drop-in engine for training loops: ``Engine(*modules)``, then ``engine.compute_gramian(output)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gramfx.errors import InputError
from gramfx.jacobian import gramian
from gramfx.torch_compat import compile_in_place


class Engine:
    """Gramians of the Jacobian of anything computed with ``modules``, by their trainable parameters.

    The modules are compiled in place with ``backend="gramfx"``: called as before they give the same outputs and plain
    gradients. They may be compiled otherwise before (that is replaced) or after.

    modules: what is called, as a whole or in parts. batch_dim: the dim of outputs that holds the samples, to have an
    error where the objectives turn out to be coupled; ``None`` takes whatever is faster, exact either way. options: as
    for the backend: ``compile``, whether Inductor compiles, and ``memory_budget``.

    Raises :class:`gramfx.errors.InputError` for anything but modules.
    """

    def __init__(self, *modules: nn.Module, batch_dim: int | None = None, **options: Any) -> None:
        for module in modules:
            if not isinstance(module, nn.Module):
                raise InputError("an Engine is made of modules", expected="torch.nn.Module", got=type(module).__name__)
        self.modules, self.batch_dim = modules, batch_dim
        for module in _outermost(modules):
            compile_in_place(module, "gramfx", options)

    def compute_gramian(self, output: Tensor | Sequence[Tensor], /) -> Tensor:
        """``J Jᵀ``, ``[m, m]`` in the output's dtype, ``m = output.numel()`` in row-major order.

        output: anything computed with the modules, with the graph still there, or several such tensors, laid end to
        end. The graph stays usable, so that ``output.backward(weights)`` may follow. Raises
        :class:`gramfx.errors.CoupledObjectivesError` where ``batch_dim`` was given and the objectives are coupled.
        """
        objectives = output if isinstance(output, Tensor) else torch.cat([one.reshape(-1) for one in output])
        parameters = [p for module in self.modules for p in module.parameters() if p.requires_grad]
        return gramian(objectives, parameters, "allow" if self.batch_dim is None else "error")


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules that no other one holds."""
    inside = {id(inner) for module in modules for inner in module.modules() if inner is not module}
    return [module for module in dict.fromkeys(modules) if id(module) not in inside]
