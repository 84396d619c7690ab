"""What a callable reaches: modules, tensors, and the plain values its graph will have baked in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Hashable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gramfx.constants import PLAIN, constants_of, contents_of, fields, frozen, inside
from gramfx.errors import UnsupportedError
from gramfx.torch_compat import is_jagged_template, is_wrapped, jagged, pytree


def reachable(root: Any) -> list[Any]:
    """Modules, tensors and plain values that ``root`` reaches through closures, defaults, attributes and containers."""
    found: list[Any] = []
    seen: set[int] = set()
    pending = [root]
    while pending:
        thing = pending.pop()
        if isinstance(thing, (*PLAIN, Tensor, nn.Module)):
            if isinstance(thing, PLAIN) or id(thing) not in seen:
                found.append(thing)
            seen.add(id(thing))
        elif id(thing) not in seen:
            seen.add(id(thing))
            pending.extend(reversed(list(_parts(thing))))
    return found


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, FunctionType):
        yield from (cell.cell_contents for cell in thing.__closure__ or () if _filled(cell))
        yield from thing.__defaults__ or ()
        yield from (thing.__kwdefaults__ or {}).values()
        named = (thing.__globals__.get(name) for name in thing.__code__.co_names)
        yield from (value for value in named if isinstance(value, (nn.Module, Tensor)))
    elif (held := contents_of(thing)) is not None:
        yield from held.values() if isinstance(held, dict) else held
    elif callable(thing) and not isinstance(thing, type) and hasattr(thing, "__dict__"):
        yield from vars(thing).values()


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def modules_of(root: Any) -> list[nn.Module]:
    """The modules that ``root`` is or reaches, outermost first, none inside another."""
    if isinstance(root, nn.Module):
        return [root]
    found = [thing for thing in reachable(root) if isinstance(thing, nn.Module)]
    inner = {id(child) for module in found for child in module.modules() if child is not module}
    return [module for module in found if id(module) not in inner]


Attribute = tuple[int, str]


def functions_of(root: Any) -> list[FunctionType]:
    """The function that a callable runs, itself, bound or as a partial; none for modules and other objects."""
    while isinstance(root, (MethodType, functools.partial)):
        root = root.__func__ if isinstance(root, MethodType) else root.func
    return [root] if isinstance(root, FunctionType) else []


def state_key(roots: list[Any], assigned: Collection[Attribute] = ()) -> tuple[Hashable, list[Any]]:
    """A key of everything but tensor values that a capture bakes in, and the objects whose identity it uses.

    Of modules: their types and forward hooks, which names share a tensor, flags, dtypes, devices, and plain attributes;
    tensors and plain values in closures; the plain class attributes and globals that code reads. ``assigned``: tensor
    attributes that the forward sets itself, left out.
    """
    key: list[Hashable] = []
    kept: dict[int, Any] = {}
    for root in roots:
        key += [constants_of(function) for function in functions_of(root)]
        for thing in reachable(root):
            if isinstance(thing, nn.Module):
                key.append(_module_key(thing, assigned, kept))
            elif isinstance(thing, Tensor):
                key.append((id(thing), thing.shape, thing.dtype, thing.device, thing.requires_grad))
            else:
                key.append((type(thing), thing))
            kept[id(thing)] = thing
    return tuple(key), list(kept.values())


def _module_key(module: nn.Module, assigned: Collection[Attribute], kept: dict[int, Any]) -> Hashable:
    order: dict[int, int] = {}
    key: list[Hashable] = [id(module)]
    classes: set[type] = set()
    for child in module.modules():
        key.append((type(child),))
        if type(child) not in classes:
            key.append(constants_of(type(child)))
            classes.add(type(child))
        key.append(tuple(id(hook) for hooks in _forward_hooks(child) for hook in hooks.values()))
        # What a wrapper keeps is its own business, and changes from call to call.
        own = {} if isinstance(child, nn.parallel.DistributedDataParallel) else vars(child)
        for name, value in own.items():
            if name not in _OF_EVERY_MODULE and (id(child), name) not in assigned:
                key.append((name, _frozen(value, kept)))
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None:
                number = order.setdefault(id(tensor), len(order))
                key.append((name, number, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad))
    return tuple(key)


_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}


def _forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return module._forward_hooks, module._forward_pre_hooks


def _frozen(value: Any, kept: dict[int, Any], around: tuple[int, ...] = ()) -> Hashable:
    """A key of an attribute: by value where it is plain, else by identity and what it holds that is plain.

    around: the containers that it is in, by identity; one may hold itself.
    """
    if id(value) in around:
        return around.index(id(value))
    if isinstance(value, (*PLAIN, set, frozenset)):
        return frozen(value)
    held = contents_of(value)
    if held is not None:
        own = tuple((name, frozen(one)) for name, one in (fields(value) or {}).items())
        names = tuple(map(str, held)) if isinstance(held, dict) else ()
        each = held.values() if isinstance(held, dict) else held
        return type(value), own, names, tuple(_frozen(one, kept, (*around, id(value))) for one in each)
    if isinstance(value, nn.Module):
        return None
    if id(value) in kept:
        return id(value)
    kept[id(value)] = value
    if isinstance(value, (type, FunctionType)):
        return id(value), constants_of(value)
    if getattr(value, "nbytes", _SMALL) < _SMALL and hasattr(value, "tobytes"):
        return id(value), value.tobytes()
    inner = {} if isinstance(value, Tensor) else inside(value)
    return id(value), tuple((name, found) for name, one in inner.items() if (found := frozen(one)) is not None)


#: Arrays of fewer bytes are told apart by what they hold.
_SMALL = 1 << 16


def tensor_attributes(program: nn.Module) -> dict[Attribute, tuple[nn.Module, Tensor]]:
    """The plain attributes of modules that hold a tensor which is neither parameter nor buffer."""
    return {
        (id(module), name): (module, value)
        for module in program.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


@contextlib.contextmanager
def attributes_kept(program: nn.Module) -> Iterator[None]:
    """A trace leaves fakes in the tensor attributes that the forward sets; put back what was there."""
    before = tensor_attributes(program)
    try:
        yield
    finally:
        for (key, name), (module, value) in tensor_attributes(program).items():
            if (key, name) not in before:
                delattr(module, name)
            elif before[key, name][1] is not value:
                setattr(module, name, before[key, name][1])


class Recorder(TorchFunctionMode):
    """Collects the tensors that a forward uses without having been given them: closed-over constants and leaves."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {id(tensor): tensor for tensor in known}
        self.loose: dict[int, Tensor] = {}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_leaf and id(leaf) not in self._known and not is_wrapped(leaf):
                self._add(leaf)
        result = function(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._known.setdefault(id(leaf), leaf)
        return result

    def _add(self, leaf: Tensor) -> None:
        if is_jagged_template(leaf):
            return
        if jagged(leaf):
            raise UnsupportedError(
                "the model uses a nested tensor that it was not given",
                expected="nested tensors among the inputs only",
                got=f"one of layout {leaf.layout}, closed over or an attribute",
                remedy="pass it as an argument, with None in in_dims if it holds no samples",
            )
        self.loose[id(leaf)] = leaf


class Substitution(TorchFunctionMode):
    """Runs a forward with some of the tensors it closes over replaced."""

    def __init__(self, replacements: dict[int, Tensor]) -> None:
        super().__init__()
        self._replacements = replacements

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def swap(leaf: Any) -> Any:
            return self._replacements.get(id(leaf), leaf)

        args, kwargs = pytree.tree_map(swap, (args, kwargs or {}))
        return function(*args, **kwargs)
