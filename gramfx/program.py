"""A model, its objective and one call's arguments as a module from tensors to objectives."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gramfx.discovery import Substitution, modules_of
from gramfx.errors import BatchSizeError, InputError, ObjectiveError, UnsupportedError
from gramfx.ragged import Jagged, refuse_holes, taken_apart
from gramfx.torch_compat import jagged, pytree
from gramfx.tree import Tree, flatten

InDims = int | None | tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """The arguments of one call: tensors apart from everything else.

    ``batch_dims[i]`` is the dim of ``tensors[i]`` that holds the samples, or ``None``. A jagged nested tensor is the
    tensor of its rows, and a :class:`Jagged` among the leaves; the offsets of all of them are the last tensors.
    ``ragged[i]`` says which tensor holds the offsets of the samples in the rows that are tensor ``i``.
    """

    tensors: tuple[Tensor, ...]
    batch_dims: tuple[int | None, ...]
    leaves: tuple[Any, ...]
    tree: Tree
    ragged: tuple[int | None, ...] = ()

    @property
    def batch_size(self) -> int | None:
        """The common size of the batch dims; ``None`` where no input has one."""
        sizes = [t.shape[d] for t, d in zip(self.tensors, self.batch_dims, strict=True) if d is not None]
        sizes += [self.tensors[offsets].shape[0] - 1 for offsets in self.ragged if offsets is not None]
        return sizes[0] if sizes else None

    def rows_of(self, index: int) -> dict[str, Any]:
        """What the placeholder of tensor ``index`` is told where it holds rows, or the offsets of samples in rows.

        ``offsets``: the placeholder's index and the dim of the rows; ``longest``: of the samples, how many rows.
        """
        marks = [leaf for leaf in self.leaves if isinstance(leaf, (Tensor, Jagged))]
        first = len(marks)
        if index >= first:
            longest = [one.longest for one in marks if isinstance(one, Jagged) and one.offsets == index - first]
            return {"longest": max(longest)}
        mark, offsets = marks[index], self.ragged[index]
        return {} if offsets is None or not isinstance(mark, Jagged) else {"rows": (f"input{offsets}", mark.dim - 1)}

    @property
    def nested(self) -> bool:
        """Whether some argument is a nested tensor."""
        return any(isinstance(leaf, Jagged) for leaf in self.leaves)

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """``(args, kwargs, targets)`` with ``tensors`` in place."""
        count = sum(isinstance(leaf, (Tensor, Jagged)) for leaf in self.leaves)
        following, offsets = iter(tensors[:count]), tensors[count:]
        leaves = [next(following) if isinstance(leaf, (Tensor, Jagged)) else leaf for leaf in self.leaves]
        leaves = [
            held.rebuilt(leaf, offsets) if isinstance(held, Jagged) else leaf
            for held, leaf in zip(self.leaves, leaves, strict=True)
        ]
        args, kwargs, targets = self.tree.unflatten(leaves)
        return args, kwargs, targets

    def key(self, *, symbolic_batch: bool) -> Hashable:
        """Equal for calls that one capture can serve."""
        shapes = []
        for tensor, dim in zip(self.tensors, self.batch_dims, strict=True):
            shape = [-1 if symbolic_batch and d == dim else size for d, size in enumerate(tensor.shape)]
            shapes.append((tuple(shape), tensor.dtype, tensor.device, tensor.requires_grad))
        # One tensor given twice is one placeholder.
        same = tuple([id(one) for one in self.tensors].index(id(tensor)) for tensor in self.tensors)
        plain = tuple(None if isinstance(leaf, Tensor) else (type(leaf), _hashable(leaf)) for leaf in self.leaves)
        return self.tree.key(), tuple(shapes), self.batch_dims, same, plain, self.ragged


def _hashable(leaf: Any) -> Hashable:
    return leaf if isinstance(leaf, Hashable) else id(leaf)


def read_call(args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...], in_dims: InDims) -> Call:
    """Take one call apart; raises :class:`InputError` or :class:`BatchSizeError` where it does not fit."""
    leaves, tree = flatten((args, kwargs, targets))
    dims = _leaf_dims(args, kwargs, targets, in_dims)
    pairs = [(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True) if isinstance(leaf, Tensor)]
    for tensor, _ in pairs:
        _check_layout(tensor)
    given = [(tensor, _normal_dim(tensor, dim)) for tensor, dim in pairs]
    _check_batch(given)
    return _without_nested(given, leaves, tree)


def _without_nested(given: list[tuple[Tensor, int | None]], leaves: list[Any], tree: Tree) -> Call:
    """The call with nested tensors taken apart."""
    offsets: list[Tensor] = []
    parts = [taken_apart(tensor, offsets) if jagged(tensor) else (None, tensor) for tensor, _ in given]
    held = iter(tensor if mark is None else mark for mark, tensor in parts)
    leaves = [next(held) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    dims = [None if mark else dim for (mark, _), (_, dim) in zip(parts, given, strict=True)]
    ragged = [
        len(given) + mark.offsets if mark and dim is not None else None
        for (mark, _), (_, dim) in zip(parts, given, strict=True)
    ]
    none = [None] * len(offsets)
    tensors = (*(tensor for _, tensor in parts), *offsets)
    return Call(tensors, (*dims, *none), tuple(leaves), tree, (*ragged, *none))


def _check_layout(tensor: Tensor) -> None:
    if jagged(tensor):
        refuse_holes(tensor)
    elif type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        raise UnsupportedError(
            "an input is not an ordinary dense tensor",
            expected="torch.Tensor, strided, or nested and jagged",
            got=f"{type(tensor).__name__} of layout {tensor.layout}",
            remedy="pass a padded tensor and a mask",
        )


def _leaf_dims(args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...], in_dims: InDims) -> list[Any]:
    """The batch dim asked for at each leaf. As in ``torch.vmap``; keywords and targets hold the samples on dim 0."""
    if isinstance(in_dims, tuple) and len(in_dims) != len(args):
        raise InputError(
            "in_dims does not fit the arguments",
            expected=f"one entry for each of {len(args)} positional arguments",
            got=f"{len(in_dims)} entries",
            remedy="give one int or None for each positional argument, or a single one for all",
        )
    each = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
    dims: list[Any] = []
    for argument, dim in zip(args, each, strict=True):
        dims.extend(_spread(argument, dim))
    rest = None if in_dims is None else 0
    return dims + _spread(kwargs, rest) + _spread(targets, rest)


def _spread(nest: Any, dim: Any) -> list[Any]:
    """``dim`` for each leaf of ``nest``; a container of dims must have the containers of ``nest``."""
    leaves, _ = flatten(nest)
    if dim is None or isinstance(dim, int):
        return [dim] * len(leaves)
    dims = pytree.tree_leaves(dim, is_leaf=lambda entry: entry is None)
    if len(dims) != len(leaves):
        raise InputError(
            "in_dims does not fit an argument",
            expected=f"an int, None, or a container with {len(leaves)} entries",
            got=repr(dim),
            remedy="mirror the argument's own containers in in_dims",
        )
    return list(dims)


def _normal_dim(tensor: Tensor, dim: int | None) -> int | None:
    if dim is None or tensor.dim() == 0:
        return None
    if jagged(tensor) and dim not in (0, -tensor.dim()):
        raise InputError(
            "in_dims names another dim of a nested tensor than that of its samples",
            expected="0 or None",
            got=str(dim),
        )
    if not -tensor.dim() <= dim < tensor.dim():
        raise InputError(
            "in_dims names a dim that an input does not have",
            expected=f"a dim of a tensor of shape {tuple(tensor.shape)}",
            got=str(dim),
            remedy="give in_dims for each argument, None for those without a batch",
        )
    return dim % tensor.dim()


def _check_batch(given: list[tuple[Tensor, int | None]]) -> None:
    sizes = {tensor.shape[dim] for tensor, dim in given if dim is not None}
    if len(sizes) > 1:
        shapes = ", ".join(f"{tuple(t.shape)} on dim {d}" for t, d in given if d is not None)
        raise BatchSizeError(
            "the inputs have different batch sizes",
            expected="one size on the batch dim of every input",
            got=shapes,
            remedy="say by in_dims which dim of each input holds the samples, None for inputs without samples",
        )


class Program(nn.Module):
    """``forward(*tensors)`` runs the model and the objective of one call, and returns the objectives alone.

    ``loose`` tensors (those the callables close over) come after the call's own, as inputs.
    """

    def __init__(self, model: Any, objective: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        if not isinstance(model, nn.Module):
            self.reached = nn.ModuleList(modules_of(model))
        if objective is not None and not isinstance(objective, nn.Module):
            self.weighed = nn.ModuleList(modules_of(objective))
        self.call: Call | None = None
        self.loose: tuple[Tensor, ...] = ()

    def forward(self, *tensors: Tensor) -> Tensor:
        """Objectives of any shape."""
        assert self.call is not None
        count = len(self.call.tensors)
        args, kwargs, targets = self.call.rebuild(tensors[:count])
        replaced = {id(tensor): given for tensor, given in zip(self.loose, tensors[count:], strict=True)}
        with Substitution(replaced):
            output = self.model(*args, **kwargs)
            objectives = output if self.objective is None else self.objective(output, *targets)
        return _checked(objectives, self.objective is None)


def _checked(objectives: Any, is_output: bool) -> Tensor:
    if not isinstance(objectives, Tensor):
        raise ObjectiveError(
            "the objectives are not a tensor",
            expected="a tensor of real objectives, of any shape",
            got=f"{'the model' if is_output else 'the objective'} returned {type(objectives).__name__}",
            remedy="pass objective=, a function from the model's output to a tensor of objectives"
            if is_output
            else "let the objective return one tensor, by torch.stack for instance",
        )
    if jagged(objectives):
        raise ObjectiveError(
            "the objectives are a nested tensor",
            expected="a dense tensor of real objectives, one for each sample for instance",
            got=f"a nested tensor of layout {objectives.layout}",
            remedy="pool each sample's rows, by torch.nested.to_padded_tensor(x, 0.0).sum(1), or take x.values()",
        )
    if not objectives.is_floating_point():
        remedy = (
            "take torch.view_as_real of them, or stack real and imaginary parts" if objectives.is_complex() else None
        )
        raise ObjectiveError(
            "the objectives have no real gradient",
            expected="a floating-point tensor",
            got=f"dtype {objectives.dtype}, shape {tuple(objectives.shape)}",
            remedy=remedy or "return losses or outputs that depend on the parameters by a differentiable path",
        )
    return objectives


def user_name(name: str) -> str:
    """The name a user knows a parameter by, from its name in a :class:`Program`."""
    return name.removeprefix("model.")
