"""What one entry of the table is, and the loader that builds it under fixed seeds."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

SEED_MODEL, SEED_INPUTS, SEED_TARGETS, SEED_FORWARD = 10, 11, 12, 13
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-10}

InDims = int | None | tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model, its inputs and its objectives; everything but `name` is made anew by `load`."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    keywords: Callable[[], dict[str, Any]] | None = None
    objective: Callable[..., Tensor] | None = None
    """objective(outputs), or objective(outputs, *targets) where there are targets; None: the output itself."""
    targets: Callable[[], Any] | None = None
    """Batch on dim 0 of every tensor."""
    closed: bool = False
    """The objective closes over its targets instead of receiving them with each call."""
    in_dims: InDims = 0
    """As in vmap, one for all positional inputs or one each; applies to every tensor inside an input."""
    out_dim: int | None = 0
    """The dim of the objectives that counts samples; None: no dim does."""
    batch_size: int = 4
    coupled: bool = False
    """The derivative of some objective with respect to another sample's activations is not zero."""
    unproven: bool = False
    """Not coupled, but a warning that it might be is acceptable."""
    alone: bool = True
    """A sample run as a batch of one gives its own rows of J. Never so for coupled or random ones."""
    random: bool = False
    """The forward draws random numbers."""
    zero: tuple[str, ...] = ()
    """Trainable parameters (or module paths) whose columns of J are zero."""
    slow: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    tol: float | None = None
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Under which plain autograd can run the model."""

    def tolerance(self, dtype: torch.dtype) -> float:
        """Largest relative error of G that still counts as exact."""
        return TOLERANCE[dtype] if self.tol is None else self.tol

    @property
    def separable(self) -> bool:
        """Whether running samples one by one must give the same rows."""
        return self.alone and not self.coupled and not self.random


@dataclass(frozen=True)
class Loaded:
    """An architecture made concrete in one dtype."""

    architecture: Architecture
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    objective: Callable[..., Tensor] | None
    targets: Any
    dtype: torch.dtype

    def forward(self) -> Any:
        """The model's output, with the random state that every comparison uses."""
        torch.manual_seed(SEED_FORWARD)
        return self.model(*self.args, **self.kwargs)

    def objectives(self) -> Tensor:
        """y, by the plain forward."""
        return apply_objective(self.objective, self.forward(), self.targets)


def apply_objective(objective: Callable[..., Tensor] | None, output: Any, targets: Any) -> Tensor:
    """The objectives made of an output."""
    if objective is None:
        return output
    if targets is None:
        return objective(output)
    return objective(output, *targets) if isinstance(targets, tuple) else objective(output, targets)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Floating-point tensors made inside have this dtype."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def _seeded(seed: int, make: Callable[[], Any] | None, default: Any) -> Any:
    torch.manual_seed(seed)
    return default if make is None else make()


def load(
    architecture: Architecture, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Loaded:
    """Builds model, inputs and targets in `dtype`, then moves them; the same call gives the same values."""
    with default_dtype(dtype):
        model = _seeded(SEED_MODEL, architecture.build, None)
        args = _seeded(SEED_INPUTS, architecture.inputs, ())
        kwargs = _seeded(SEED_INPUTS + 100, architecture.keywords, {})
        targets = _seeded(SEED_TARGETS, architecture.targets, None)
    if device is not None:
        model, (args, kwargs, targets) = model.to(device), _moved((args, kwargs, targets), device)
    return _bind(Loaded(architecture, model, args, kwargs, architecture.objective, targets, dtype))


def _moved(tree: Any, device: torch.device | str) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def _bind(loaded: Loaded) -> Loaded:
    """Hides the targets inside the objective where the architecture says so."""
    function, targets = loaded.objective, loaded.targets
    if not loaded.architecture.closed or function is None or targets is None:
        return loaded
    return replace(loaded, objective=lambda output: apply_objective(function, output, targets), targets=None)


def _changed(architecture: Architecture, dtype: torch.dtype, change: Callable[[Any, int], Any]) -> Loaded:
    """Loaded, then `change(tensor, dim)` of every tensor that holds samples."""

    def changed(tree: Any, dim: int | None) -> Any:
        def one(leaf: Any) -> Any:
            return leaf if dim is None or not isinstance(leaf, Tensor) or not leaf.dim() else change(leaf, dim)

        return pytree.tree_map(one, tree)

    loaded = load(replace(architecture, closed=False), dtype)
    dims = architecture.in_dims
    each = dims if isinstance(dims, tuple) else (dims,) * len(loaded.args)
    args = tuple(changed(tree, dim) for tree, dim in zip(loaded.args, each, strict=True))
    rest = None if dims is None else 0
    return replace(loaded, args=args, kwargs=changed(loaded.kwargs, rest), targets=changed(loaded.targets, rest))


def load_alone(architecture: Architecture, sample: int, dtype: torch.dtype = torch.float64) -> Loaded:
    """The same model with one sample as its whole batch."""
    return _changed(architecture, dtype, lambda tensor, dim: tensor.narrow(dim, sample, 1))


def load_resized(architecture: Architecture, count: int, dtype: torch.dtype = torch.float64) -> Loaded:
    """The same model with `count` samples, those there are, again and again."""

    def change(tensor: Tensor, dim: int) -> Tensor:
        return tensor.index_select(dim, torch.arange(count) % tensor.shape[dim])

    return _changed(architecture, dtype, change)
