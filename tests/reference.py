"""The oracle: dense Jacobians by plain autograd, one backward pass an objective. Imports nothing of the product."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def named_trainable(*modules: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters by name, in `named_parameters` order, a shared one once under its first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for position, module in enumerate(modules):
        prefix = f"{position}." if len(modules) > 1 else ""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                found[prefix + name] = parameter
    return found


def trainable(*modules: nn.Module) -> list[Tensor]:
    """Unique trainable parameters of the modules, in order. A callable over modules passes all of them."""
    return list(named_trainable(*modules).values())


def width(parameter: Tensor) -> int:
    """Number of columns of the Jacobian; a complex entry has two, its real and its imaginary part."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def columns(named: dict[str, Tensor]) -> dict[str, slice]:
    """The columns of the Jacobian that belong to each parameter."""
    found, start = {}, 0
    for name, parameter in named.items():
        found[name] = slice(start, start + width(parameter))
        start += width(parameter)
    return found


def columns_under(named: dict[str, Tensor], prefix: str) -> Tensor:
    """Indices of the columns of one parameter, or of every parameter below a module path."""
    chosen = [
        torch.arange(s.start, s.stop) for n, s in columns(named).items() if n == prefix or n.startswith(prefix + ".")
    ]
    if not chosen:
        raise KeyError(f"no trainable parameter at or below {prefix!r} among {list(named)}")
    return torch.cat(chosen)


def flat(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """A gradient as columns of the Jacobian; None is zero."""
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.detach().reshape(-1)


def _gradient(value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    gradients: Sequence[Tensor | None] = [None] * len(parameters)
    if value.requires_grad:
        gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return torch.cat([flat(g, p) for g, p in zip(gradients, parameters, strict=True)])


def jacobian(objectives: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """J [m, P]: row i holds the gradient of entry i of `objectives`, flattened row-major."""
    rows = [_gradient(value, parameters) for value in objectives.reshape(-1)]
    if rows:
        return torch.stack(rows)
    return torch.zeros(0, sum(map(width, parameters)), dtype=objectives.dtype, device=objectives.device)


def gramian(objectives: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """G = J Jᵀ [m, m]."""
    rows = jacobian(objectives, parameters)
    return rows @ rows.T


def separate_gramian(run: Callable[[list[Tensor]], Tensor], clones: Iterable[Tensor]) -> Tensor:
    """Σ_u J_u J_uᵀ [m, m]: every use of a parameter reads its own clone, and no two uses meet.

    `run` evaluates the objectives from one clone a use, for instance by interpreting a captured graph.
    """
    leaves = [clone.detach().clone().requires_grad_() for clone in clones]
    objectives = run(leaves)
    blocks = [gramian(objectives, [leaf]) for leaf in leaves]
    return torch.stack(blocks).sum(0) if blocks else objectives.new_zeros(objectives.numel(), objectives.numel())


def weighted_gradient(objectives: Tensor, parameters: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Jᵀ w [P], by one backward pass a parameter."""
    value = (objectives.reshape(-1) * weights).sum()
    return torch.cat([_gradient(value, [parameter]) for parameter in parameters])


def relative_error(got: Tensor, want: Tensor) -> float:
    """max|got - want| / max|want|, in float64; the plain distance where `want` is zero; 0 for empty tensors."""
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: got {tuple(got.shape)}, want {tuple(want.shape)}")
    if want.numel() == 0:
        return 0.0
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    distance, scale = (got - want).abs().max().item(), want.abs().max().item()
    return distance / scale if scale > 0 else distance


@dataclass(frozen=True)
class Snapshot:
    """What belongs to the user and must be as the plain forward would leave it."""

    tensors: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    identities: dict[str, int]
    flags: dict[str, bool]
    hooks: dict[str, int]
    random: list[Tensor]


def _hook_count(module: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for kind in kinds)


def snapshot(model: nn.Module) -> Snapshot:
    """Copies of parameters, buffers, gradients, flags and random state."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    modules = dict(model.named_modules())
    random = [torch.get_rng_state()] + (torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])
    return Snapshot(
        tensors={name: tensor.detach().clone() for name, tensor in {**parameters, **buffers}.items()},
        gradients={name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()},
        identities={name: id(parameter) for name, parameter in parameters.items()},
        flags={name: module.training for name, module in modules.items()}
        | {f"{name} (parameter)": p.requires_grad for name, p in parameters.items()},
        hooks={name: _hook_count(module) for name, module in modules.items()},
        random=random,
    )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.to_dense().nan_to_num(), b.to_dense().nan_to_num())
    )


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """What differs between two snapshots of one model, in words; empty when nothing does."""
    found = []
    for kind in ("tensors", "gradients"):
        a, b = getattr(before, kind), getattr(after, kind)
        found += [
            f"{kind}: {name}"
            for name in sorted(a.keys() | b.keys())
            if name not in a or name not in b or not _equal(a[name], b[name])
        ]
    for kind in ("identities", "flags", "hooks"):
        if getattr(before, kind) != getattr(after, kind):
            found.append(kind)
    if len(before.random) != len(after.random) or not all(map(torch.equal, before.random, after.random)):
        found.append("random state")
    return found


def same(before: Snapshot, after: Snapshot) -> bool:
    """True when nothing of the user's differs."""
    return not differences(before, after)
