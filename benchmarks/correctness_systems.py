"""The systems of :mod:`benchmarks.correctness`, each used as its documentation says."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import gramfx
from benchmarks.models import Workload

#: The random state before each forward.
SEED = 1


class MissingGradient(RuntimeError):
    """A system left a trainable parameter without its per-sample gradients."""


@dataclass(frozen=True)
class System:
    """``solve``: the Gramian, or its diagonal where a system has norms alone.

    ``package`` is what must be installed, and is looked up in tracebacks; ``distribution`` is its name to pip.
    ``words`` are those of errors that name the trouble, where they are raised outside of the package; ``caveat`` is in
    a warning that names it. ``excluded``: situations that the documentation rules out, besides coupled ones.
    """

    solve: Callable[[Workload], Tensor]
    package: str
    distribution: str
    words: tuple[str, ...] = ()
    caveat: str | None = None
    excluded: tuple[str, ...] = ()

    def refuses(self, error: Exception) -> bool:
        """Whether the system raised it on purpose, with a message, rather than ran into it."""
        if self.words:
            return any(word in str(error) for word in self.words)
        last = traceback.extract_tb(error.__traceback__)[-1]
        raised = (last.line or "").startswith("raise")
        return raised and bool(str(error)) and self.package in Path(last.filename).parts


def flat(gradients: Tensor) -> Tensor:
    """Rows of real numbers, a sample each; a complex entry has a column for each of its parts."""
    if gradients.is_complex():
        gradients = torch.view_as_real(gradients.resolve_conj())
    return gradients.detach().reshape(len(gradients), -1)


def gramian(gradients: Iterable[Tensor]) -> Tensor:
    """From the per-sample gradients of each parameter."""
    rows = torch.cat([flat(one) for one in gradients], 1).double()
    return rows @ rows.T


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name, a shared one once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def gathered(model: nn.Module, attribute: str) -> Tensor:
    """The Gramian from what a system left on the parameters."""
    left = {name: getattr(parameter, attribute, None) for name, parameter in trainable(model).items()}
    found = {name: gradients for name, gradients in left.items() if isinstance(gradients, Tensor)}
    if len(found) < len(left):
        raise MissingGradient(f"no {attribute} for {', '.join(left.keys() - found.keys())}")
    return gramian(found.values())


def reference(held: Workload) -> Tensor:
    """One backward pass of autograd for each objective."""
    torch.manual_seed(SEED)
    parameters, rows = list(trainable(held.model).values()), []
    for loss in held.losses():
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
        rows.append([one[None] for one in gradients])
    return gramian(torch.cat(column) for column in zip(*rows, strict=True))


# ---------------------------------------------------------------- the systems


def by_gramfx(held: Workload) -> Tensor:
    """In one pass."""
    step = gramfx.transform(held.model, held.objective, compile=False)
    return step(*held.inputs, targets=held.targets)[1]


def by_opacus(held: Workload, functorch: bool = False) -> Tensor:
    """``GradSampleModule`` on a model that Opacus's validator accepts, as ``PrivacyEngine`` makes it."""
    from opacus import GradSampleModule
    from opacus.validators import ModuleValidator

    ModuleValidator.validate(held.model, strict=True)
    model = GradSampleModule(held.model, loss_reduction="sum", force_functorch=functorch)
    held.objective(model(*held.inputs), held.targets).sum().backward()
    return gathered(held.model, "grad_sample")


def by_opacus_ghost(held: Workload) -> Tensor:
    """The squares of ghost clipping's norms."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.validators import ModuleValidator

    ModuleValidator.validate(held.model, strict=True)
    model = GradSampleModuleFastGradientClipping(held.model, loss_reduction="sum")
    held.objective(model(*held.inputs), held.targets).sum().backward()
    return model.get_norm_sample().square()


def by_backpack(held: Workload) -> Tensor:
    """The extension ``BatchGrad``; a loss of one's own needs no extending for first-order quantities."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    model = extend(held.model)
    with backpack(BatchGrad()):
        held.objective(model(*held.inputs), held.targets).sum().backward()
    return gathered(held.model, "grad_batch")


def by_expanded_weights(held: Workload) -> Tensor:
    """torch's own ``call_for_per_sample_grads``."""
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    run = call_for_per_sample_grads(held.model, batch_size=len(held.targets), loss_reduction="sum")
    held.objective(run(*held.inputs), held.targets).sum().backward()
    return gathered(held.model, "grad_sample")


def by_vmap(held: Workload) -> Tensor:
    """``vmap(grad(...))`` of one sample's loss, as a batch of one."""
    learned = {name: parameter.detach() for name, parameter in trainable(held.model).items()}
    fixed = {name: parameter for name, parameter in held.model.named_parameters() if name not in learned}
    others: dict[str, Tensor] = {**fixed, **dict(held.model.named_buffers())}

    def loss(parameters: dict[str, Tensor], inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        output = functional_call(held.model, {**others, **parameters}, tuple(one[None] for one in inputs))
        return held.objective(output, targets[None]).squeeze(0)

    found = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(learned, held.inputs, held.targets)
    return gramian(found.values())


def by_nngeometry(held: Workload) -> Tensor:
    """``GramMatrix``, the Gramian of per-sample Jacobians."""
    from nngeometry.gram import GramMatrix

    def losses(*data: Tensor) -> Tensor:
        torch.manual_seed(SEED)  # it runs the model twice
        return held.objective(held.model(*data[:-1]), data[-1])[:, None]

    found: Tensor = GramMatrix(held.model, (*held.inputs, held.targets), function=losses).to_torch()
    return found[0, :, 0, :]


def by_torchjd(held: Workload, batch_dim: int | None) -> Tensor:
    """``Engine`` of TorchJD."""
    from torchjd.autogram import Engine

    engine = Engine(held.model, batch_dim=batch_dim)
    return engine.compute_gramian(held.losses())


SYSTEMS: dict[str, System] = {
    "gramfx": System(by_gramfx, "gramfx", "gramfx"),
    "opacus-ghost": System(by_opacus_ghost, "opacus", "opacus"),
    "opacus-hooks": System(by_opacus, "opacus", "opacus"),
    "opacus-functorch": System(partial(by_opacus, functorch=True), "opacus", "opacus"),
    "backpack": System(by_backpack, "backpack", "backpack-for-pytorch", caveat="BatchNorm module in training mode"),
    "expanded-weights": System(by_expanded_weights, "torch", "torch", ("Expanded",), excluded=("LSTM, packed",)),
    "vmap-grad": System(by_vmap, "torch", "torch", ("vmap", "functorch", "torch.func"), excluded=("centred inputs",)),
    "nngeometry": System(by_nngeometry, "nngeometry", "nngeometry"),
    "torchjd-batched": System(
        partial(by_torchjd, batch_dim=0),
        "torchjd",
        "torchjd",
        excluded=("child's parameter used", "positions as [1, T] ids"),
    ),
    "torchjd-unbatched": System(
        partial(by_torchjd, batch_dim=None), "torchjd", "torchjd", excluded=("child's parameter used",)
    ),
}
