"""Every private or version-dependent use of torch, in one place. Checked with torch 2.13 and 2.14."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import sympy
import torch
import torch._decomp
import torch._dynamo
import torch._functorch.config
import torch.export
import torch.fx._symbolic_trace
import torch.nn.utils.rnn
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._export.utils import _is_preservable_cia_op
from torch._logging._internal import LazyTraceHandler, trace_log, trace_structured
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)
from torch.fx.graph import _BoxedCodeGen
from torch.fx.traceback import preserve_node_meta
from torch.nested._internal.nested_tensor import (
    NestedTensor,
    nested_from_padded,
    nested_view_from_values_offsets,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = [
    "DATA_DEPENDENT",
    "READS_VALUES",
    "RELAXED",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "Fixed",
    "InputKind",
    "JaggedParts",
    "OutputKind",
    "WeakTensorKeyDictionary",
    "ambient_state",
    "at_end_of_backward",
    "autocast_as",
    "autocast_off",
    "autocast_state",
    "below_autograd",
    "boxed",
    "compile_graph",
    "compile_in_place",
    "compile_plain",
    "contiguous",
    "current_backward",
    "data_dependent",
    "does_more_than_average",
    "export_program",
    "failures_unlogged",
    "fake_batch_size",
    "fake_mode_of",
    "flat_weights_kept",
    "function_applied",
    "functions_replaced",
    "functorch_levels_closed",
    "graph_kept",
    "in_functorch",
    "is_checkpoint",
    "is_jagged_template",
    "is_symbolic",
    "is_torchs_own",
    "is_wrapped",
    "jagged",
    "jagged_from",
    "jagged_from_padded",
    "jagged_known",
    "jagged_parts",
    "lengths_replaced",
    "lists_replaced",
    "nesting_traced",
    "new_fake_inputs",
    "numberless",
    "on_fresh_fakes",
    "on_rows",
    "packing_replaced",
    "pytree",
    "random_ops_seen",
    "read_from_values",
    "repeated",
    "same_shape",
    "same_size",
    "size_conditions",
    "source_name",
    "spelled",
    "synchronise_buffers",
    "trace",
    "trace_artifact",
    "tracing_artifacts",
    "tracing_quirks",
    "undispatched",
]

aten = torch.ops.aten
_functorch: Any = torch._C._functorch

#: What torch raises when Python needs a value that only running the model would tell.
DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)

#: The tags of ops whose results are numbers, or have a size, that tensor values make.
READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

#: Views that also take tensors of other strides than the graph was traced with.
RELAXED: dict[Any, Any] = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}

#: Ops whose backward gives wrong values under ``vmap``.
_WRONG_UNDER_VMAP = {
    aten.cdist.default,
    aten._cdist_forward.default,
    aten._cdist_backward.default,
    aten.index_fill.int_Tensor,
}

# What these log on a failure is raised as well.
_LOUD = (
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.fx.experimental.proxy_tensor",
    "torch._export.non_strict_utils",
    "torch.export._trace",
)


def is_symbolic(size: Any) -> bool:
    """Whether a size is still a symbol, not a number."""
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None


def spelled(size: Any) -> str:
    """A size as text, ``B`` for a symbolic batch."""
    if not is_symbolic(size):
        return str(size)
    expression = size.node.expr
    return str(expression.subs(dict.fromkeys(expression.free_symbols, sympy.Symbol("B"))))


class Fixed:
    """Values with a symbolic batch as they are at one batch size, fake tensors in a mode of their own."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def __call__(self, held: Any) -> Any:
        """The same with numbers for symbols."""
        return pytree.tree_map(self._one, held)

    def _one(self, leaf: Any) -> Any:
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            expression = leaf.node.expr
            return leaf.node.pytype(expression.subs(dict.fromkeys(expression.free_symbols, self.batch)))
        if not isinstance(leaf, Tensor):
            return leaf
        with self.mode:
            shape, stride = self(tuple(leaf.shape)), self(tuple(leaf.stride()))
            return torch.empty_strided(shape, stride, dtype=leaf.dtype, device=leaf.device)


def data_dependent(held: Any) -> bool:
    """Whether a fake value has a size that only running the model would tell."""
    return any(bool(free_unbacked_symbols(leaf)) for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor))


def read_from_values(held: Any) -> bool:
    """Whether a trace's stand-in for a number stands for one that was read from a tensor."""
    return isinstance(held, (torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(free_unbacked_symbols(held))


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal at every batch size; comparing them by ``==`` would fix a symbolic one."""
    left, right = (size.node.expr if isinstance(size, torch.SymInt) else size for size in (a, b))
    return bool(left == right)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """:func:`same_size` for all dims."""
    return len(a) == len(b) and all(map(same_size, a, b))


def contiguous(fake: Any) -> Any:
    """A contiguous fake of the same shape; anything but a fake tensor as it is."""
    if not isinstance(fake, FakeTensor):
        return fake
    with fake.fake_mode:
        return torch.empty_like(fake, memory_format=torch.contiguous_format)


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor exists inside a ``torch.func`` transform only."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def in_functorch() -> bool:
    """Whether a ``torch.func`` transform is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextlib.contextmanager
def functorch_levels_closed() -> Iterator[None]:
    """A trace that fails inside ``vmap`` leaves its level open, and everything after it fails; close those."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        while torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
            torch._C._functorch.pop_dynamic_layer_stack()


def below_autograd() -> Any:
    """A context in which calls pass autograd by."""
    return torch._C._AutoDispatchBelowAutograd()


_APPLY: Any = torch._C._FunctionBase.__dict__["apply"]
#: Until torch 2.13 ``Function.apply`` calls that of its base class; from 2.14 on it is the engine's own entry.
_APPLY_IS_ENTRY = torch.autograd.Function.__dict__["apply"] is _APPLY
_APPLIER: Any = torch.autograd.Function if _APPLY_IS_ENTRY else torch.autograd.function._SingleLevelFunction


def function_applied(cls: type, *args: Any, **kwargs: Any) -> Any:
    """``cls.apply(*args, **kwargs)`` of an autograd Function, whatever replaces that."""
    return _APPLY.__get__(None, cls)(*args, **kwargs)


@contextlib.contextmanager
def functions_replaced(apply: Callable[..., Any], kept: Any = None) -> Iterator[None]:
    """Let calls of autograd Functions be calls of ``apply(cls, *args, **kwargs)``.

    A ``cls.apply`` that the user kept may be the engine's own entry, which looks like no call of ours; there the user's
    Function becomes ``kept``, another Function, whose forward is given the class before the arguments.
    """
    lookup = _entered_as(kept) if kept else type.__getattribute__
    found = mock.patch.object(torch.autograd.function.FunctionMeta, "__getattribute__", lookup)
    with (
        mock.patch.object(_APPLIER, "apply", classmethod(apply), create=True),
        found if _APPLY_IS_ENTRY else contextlib.nullcontext(),
    ):
        yield


def is_torchs_own(cls: type) -> bool:
    """Whether a class is defined by torch."""
    return cls.__module__.partition(".")[0] == "torch"


def _entered_as(kept: Any) -> Callable[[Any, str], Any]:
    """What the engine's entry finds in a Function, with that of ``kept`` in its place.

    The entry makes a context of ``_backward_cls``, then calls ``forward``, with the context where the class has no
    ``setup_context`` to call after it. It switches gradients off for that, and on again, where no trace sees it.
    """
    entered: dict[tuple[Any, str], Any] = {}

    def lookup(cls: Any, name: str) -> Any:
        if name == "_backward_cls" and not (is_torchs_own(cls) or cls.__module__ == kept.__module__):
            context, gradients = kept._backward_cls(), torch.is_grad_enabled()
            plain = cls.setup_context is torch.autograd.Function.setup_context

            def forward(*args: Any) -> Any:
                with torch._C.DisableTorchFunction():
                    torch._C._set_grad_enabled(gradients)
                return kept.forward(context, cls, *args[1 if plain else 0 :])

            entered[cls, "forward"] = forward
            if not plain:
                entered[cls, "setup_context"] = lambda *_: None
            return lambda: context
        return entered.pop((cls, name), None) or type.__getattribute__(cls, name)

    return lookup


def is_checkpoint(cls: type) -> bool:
    """Whether a Function is that of reentrant activation checkpointing."""
    return cls is torch.utils.checkpoint.CheckpointFunction


def on_fresh_fakes(function: Callable[..., Any], tensors: Sequence[Tensor], more: int = 0) -> Any:
    """``function`` of a fake mode and tensors with these sizes and types and no numbers, outside of any trace.

    Symbols stand at the size that they were seen at, and ``more``.
    """

    def number(size: Any) -> int:
        if not is_symbolic(size):
            return int(size)
        expression, environment = size.node.expr, size.node.shape_env
        seen = {symbol: environment.size_hint(symbol) + more for symbol in expression.free_symbols}
        return int(expression.xreplace(seen))

    kinds = [(tuple(map(number, t.shape)), t.dtype, t.device) for t in tensors]
    with _disable_current_modes(), FakeTensorMode() as mode:
        return function(mode, *(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in kinds))


@contextlib.contextmanager
def undispatched() -> Iterator[None]:
    """Run operations on real tensors past every mode, whatever traces outside."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def lists_replaced(tolist: Callable[[Tensor], Any]) -> Any:
    """A context in which ``tolist`` of a fake tensor is another function: its own reads one number after another."""
    return mock.patch.object(FakeTensor, "tolist", lambda tensor: tolist(tensor))


class _Seen(DispatchMode):
    def __init__(self, tag: torch.Tag) -> None:
        super().__init__()
        self.tag, self.ops = tag, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.tag in func.tags:
            self.ops.append(func)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def random_ops_seen() -> Iterator[list[Any]]:
    """A list of the ops that drew random numbers."""
    with _Seen(torch.Tag.nondeterministic_seeded) as seen:
        yield seen.ops


def current_backward() -> int:
    """The number of the backward pass that is running, -1 where none is."""
    number: int = torch._C._current_graph_task_id()
    return number


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have ``call`` called when the backward pass that is running is over."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def does_more_than_average(wrapper: Any) -> bool:
    """Whether a DistributedDataParallel was given hooks of its own, or casts what it is given."""
    return bool(wrapper._comm_hooks) or wrapper.mixed_precision is not None


def synchronise_buffers(wrapper: Any) -> None:
    """Give the buffers of a DistributedDataParallel the values of its first process, if its forward would."""
    if wrapper._check_sync_bufs_pre_fwd():
        wrapper._sync_buffers()


def jagged(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a nested tensor of any layout."""
    return tensor.is_nested


@dataclasses.dataclass(frozen=True)
class JaggedParts:
    """What a nested tensor of layout jagged is made of; ``dim`` is the ragged one."""

    values: Tensor
    offsets: Tensor
    dim: int
    shortest: int
    longest: int


def jagged_parts(tensor: Any) -> JaggedParts | str:
    """A nested tensor taken apart, nothing written to it; why it cannot be, where it is not made of whole rows."""
    if not isinstance(tensor, NestedTensor):
        return f"a nested tensor of layout {tensor.layout}"
    offsets = tensor.offsets()
    if tensor.lengths() is not None:
        return "one with lengths of its own, as torch.nested.narrow makes"
    # Once: on a GPU it is waited for.
    places: list[int] = offsets.tolist()
    if places[0] or places[-1] != tensor._values.shape[tensor._ragged_idx - 1]:
        return "one whose samples are not all of its rows"
    lengths = [end - start for start, end in itertools.pairwise(places)] or [0]
    shortest, longest = tensor._maybe_min_seqlen, tensor._maybe_max_seqlen
    if min(lengths) < 0 or (longest is not None and longest < max(lengths)):
        return f"one with samples of {min(lengths)} to {max(lengths)} rows and a max_seqlen of {longest}"
    shortest = min(lengths) if shortest is None else shortest
    values = tensor.values() if tensor.requires_grad else tensor._values
    return JaggedParts(values, offsets, tensor._ragged_idx, shortest, max(lengths) if longest is None else longest)


def jagged_known(tensor: Any) -> JaggedParts | None:
    """What a nested tensor made of whole rows is made of, its lengths as far as they were told to it; also of fakes."""
    if not isinstance(tensor, NestedTensor) or tensor.lengths() is not None:
        return None
    shortest, longest = tensor._maybe_min_seqlen, tensor._maybe_max_seqlen
    if shortest is None or longest is None:
        return None
    return JaggedParts(tensor._values, tensor.offsets(), tensor._ragged_idx, shortest, longest)


def jagged_from_padded(padded: Tensor, like: JaggedParts) -> Tensor:
    """``[samples, longest, …]`` as a nested tensor with as many rows a sample as another one, its ragged dim 1."""
    made: Tensor = nested_from_padded(
        padded, like.offsets, 1, like.shortest, like.longest, like.values.shape[like.dim - 1]
    )
    return made


def on_rows(function: Callable[[Tensor], Tensor], tensor: Any) -> Any:
    """``function`` of the rows of a nested tensor, without derivatives; of any other tensor as it is."""
    parts = jagged_known(tensor)
    if parts is None:
        return function(tensor)
    return jagged_from(dataclasses.replace(parts, values=function(parts.values)))


def nesting_traced() -> Any:
    """A context in which models may call ``torch.nested.nested_tensor_from_jagged``, which refuses to be traced."""
    return mock.patch.object(torch.fx._symbolic_trace, "is_fx_tracing", lambda: False)


def is_jagged_template(tensor: Tensor) -> bool:
    """Whether this is the tensor without numbers that torch hands around to make views that are nested."""
    return tensor.is_nested and tensor.device.type == "meta"


def jagged_from(parts: JaggedParts) -> Tensor:
    """The nested tensor, differentiable by its values.

    ``torch.nested.nested_tensor_from_jagged`` does this, and refuses to be traced.
    """
    made: Tensor = nested_view_from_values_offsets(
        parts.values, parts.offsets, parts.dim, min_seqlen=parts.shortest, max_seqlen=parts.longest
    )
    return made


def ambient_state() -> tuple[Any, ...]:
    """The global settings that a capture bakes in: autocast and the default dtype."""
    return (*autocast_state(), torch.get_default_dtype())


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Whether and to what each kind of device casts."""
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))


@contextlib.contextmanager
def autocast_as(state: tuple[tuple[str, bool, torch.dtype], ...]) -> Iterator[None]:
    """Cast as was done when ``state`` was taken."""
    with contextlib.ExitStack() as stack:
        for now, (device, enabled, dtype) in zip(autocast_state(), state, strict=True):
            if now != (device, enabled, dtype):
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
        yield


@contextlib.contextmanager
def autocast_off() -> Iterator[None]:
    """Run a graph as it is: its casts are its own, and ambient autocast would add more."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def fake_batch_size(graph_module: GraphModule) -> Any:
    """The symbol of the batch, read off the first input that has one."""
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" and node.meta.get("batch_dim") is not None:
            return node.meta["val"].shape[node.meta["batch_dim"]]
    return None


@contextlib.contextmanager
def failures_unlogged() -> Iterator[None]:
    """Let torch raise what fails on tensors without numbers, and not log it as well."""
    loud = [logger for logger in map(logging.getLogger, _LOUD) if not logger.disabled]
    try:
        for logger in loud:
            logger.disabled = True
        yield
    finally:
        for logger in loud:
            logger.disabled = False


@contextlib.contextmanager
def tracing_quirks() -> Iterator[None]:
    """What torch 2.13 needs to trace right.

    The decomposition of ``nll_loss`` takes other arguments than the op and gives its result the wrong fake shape;
    einsum with three operands asks opt_einsum for a path and specialises the batch.
    """
    table: Any = torch._decomp.decomposition_table
    wrong = [aten.nll_loss.default, aten.hinge_embedding_loss.default, aten.margin_ranking_loss.default]
    held = {op: table.pop(op) for op in wrong if op in table}
    path_search = torch.backends.opt_einsum.enabled
    torch.backends.opt_einsum.enabled = False
    _functorch._set_vmap_fallback_warning_enabled(False)
    # By default only frames of functions named forward are kept, and a user's helpers are not.
    all_frames = property(lambda tracer: False, lambda tracer, only_forward: None)
    frames = mock.patch.object(PythonKeyTracer, "_record_forward_stack_traces_only", all_frames)
    try:
        with failures_unlogged(), frames, warnings.catch_warnings():
            # The model's own warnings were shown by its eager run; the rest is torch about torch.
            warnings.simplefilter("ignore")
            yield
    finally:
        _functorch._set_vmap_fallback_warning_enabled(True)
        torch.backends.opt_einsum.enabled = path_search
        table.update(held)


def export_program(
    program: nn.Module,
    tensors: Sequence[Tensor],
    batch_dims: Sequence[int | None],
    dynamic: bool,
    decompositions: dict[Any, Callable[..., Any]],
) -> Any:
    """``torch.export`` of ``program(*tensors)``: functional, whole ATen ops but for those with ``decompositions``.

    With ``dynamic`` the dims named in ``batch_dims`` share one symbol.
    """
    batch = torch.export.Dim("batch", min=2)
    shapes = tuple({} if dim is None else {dim: batch} for dim in batch_dims)
    # Export prints the graph that it could not finish.
    quiet = mock.patch("torch.export._trace.print", lambda *_, **__: None, create=True)
    with tracing_quirks(), quiet:
        exported = torch.export.export(
            program, tuple(tensors), dynamic_shapes=(shapes,) if dynamic else None, strict=False
        )
        _keep_stop_gradients(exported.graph_module)
        return _functional(exported, decompositions | {aten._weight_norm.default: _weight_norm})


def _functional(exported: Any, decompositions: dict[Any, Callable[..., Any]]) -> Any:
    """``exported.run_decompositions(decompositions)``, which keeps composite ops whole where they are functional.

    Torch prepares every composite op that it has for that, in a quarter of a second. Where none of the decompositions
    is of the graph, only the ops in the graph can come up.
    """
    modules = [module for module in exported.graph_module.modules() if isinstance(module, GraphModule)]
    met = {node.target for module in modules for node in module.graph.nodes if node.op == "call_function"}
    if not met.isdisjoint(decompositions):
        return exported.run_decompositions(decompositions)
    composite = {op for op in met if isinstance(op, torch._ops.OpOverload) and _is_preservable_cia_op(op)}
    with mock.patch.object(torch.export.exported_program, "_collect_all_valid_cia_ops", lambda: composite):
        return exported.run_decompositions({})


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """``g v / |v|``; the fused op has no batching rule."""
    others = [d for d in range(v.dim()) if d != dim]
    return v * (g / torch.linalg.vector_norm(v, 2, others, keepdim=dim >= 0))


def _keep_stop_gradients(graph_module: GraphModule) -> None:
    """Detach what comes out of ``no_grad`` regions: inlining them later forgets that they were."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op == "get_attr" and isinstance(held := getattr(graph_module, str(node.target), None), GraphModule):
            _keep_stop_gradients(held)
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False:
            for item in [user for user in node.users if user.target.__name__ == "getitem"]:
                with graph.inserting_after(item):
                    stopped = graph.call_function(aten.detach.default, (item,))
                stopped.meta = dict(item.meta)
                item.replace_all_uses_with(stopped, delete_user_cb=lambda user, keep=stopped: user is not keep)
    graph_module.recompile()


def fake_mode_of(graph_module: GraphModule) -> FakeTensorMode:
    """The mode that made the fake values of a graph."""
    for node in graph_module.graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


@contextlib.contextmanager
def packing_replaced(pack: Any, unpack: Any, run: Any) -> Iterator[None]:
    """Let ``PackedSequence`` and the recurrent layers call other functions than torch's own.

    pack, unpack: for ``_VF._pack_padded_sequence`` and its inverse. run: ``(kind, *arguments)`` for the layers, given
    ``kind`` and what ``_VF.lstm`` and its like were called with; ``NotImplemented`` leaves it to them. Sequences are
    not sorted.
    """
    rnn, layers, plain = torch.nn.utils.rnn, torch.nn.modules.rnn, torch._VF

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def sort(self, lengths: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
            return lengths, torch.arange(lengths.shape[0])

    class Functions:
        _pack_padded_sequence = staticmethod(pack)
        _pad_packed_sequence = staticmethod(unpack)

        def __getattr__(self, name: str) -> Any:
            if name not in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
                return getattr(plain, name)

            def call(*arguments: Any) -> Any:
                result = run(name, *arguments)
                return getattr(plain, name)(*arguments) if result is NotImplemented else result

            return call

    functions = Functions()
    with (
        mock.patch.object(rnn, "torch", Torch()),
        mock.patch.object(rnn, "_VF", functions),
        mock.patch.object(rnn, "invert_permutation", lambda permutation: permutation),
        mock.patch.object(layers, "_VF", functions),
    ):
        yield


@contextlib.contextmanager
def lengths_replaced(change: Callable[[Tensor], Tensor]) -> Iterator[list[bool]]:
    """Pack sequences with other lengths than those asked for, which ``change`` gets in the order of the samples.

    Gives a list that says of each whether they are others.
    """
    rnn, plain = torch.nn.utils.rnn, torch._VF
    changed: list[Tensor] = []
    others: list[bool] = []

    def replaced(lengths: Tensor) -> Tensor:
        found = change(lengths)
        others.append(not torch.equal(found, lengths))
        return found

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def sort(self, lengths: Tensor, descending: bool) -> Any:
            found = torch.sort(replaced(lengths), descending=descending)
            changed.append(found[0])
            return found

    class Functions:
        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

        def _pack_padded_sequence(self, source: Tensor, lengths: Tensor, batch_first: bool) -> Any:
            sorted_before = any(lengths is one for one in changed)
            return plain._pack_padded_sequence(source, lengths if sorted_before else replaced(lengths), batch_first)

    with mock.patch.object(rnn, "torch", Torch()), mock.patch.object(rnn, "_VF", Functions()):
        yield others


@contextlib.contextmanager
def flat_weights_kept(program: nn.Module) -> Iterator[None]:
    """Recurrent layers keep lists of their weights, which tracing fills with fakes and other calls with copies."""
    layers = [layer for layer in program.modules() if isinstance(layer, nn.RNNBase)]
    held: list[tuple[Any, Any, Any]] = [(one, list(one._flat_weights), one._flat_weight_refs) for one in layers]
    try:
        yield
    finally:
        for layer, weights, references in held:
            layer._flat_weights, layer._flat_weight_refs = weights, references


def numberless() -> FakeTensorMode:
    """A mode in which tensors have sizes and no numbers. Nested tensors want the environment, for their ragged size."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


def new_fake_inputs(tensors: Sequence[Tensor], batch_dims: Sequence[int | None], dynamic: bool) -> list[Any]:
    """Fakes of ``tensors``, outside export: static, or with one symbol for the batch."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(duck_shape=True))
    made = []
    for tensor, dim in zip(tensors, batch_dims, strict=True):
        sizes = [DimDynamic.STATIC] * tensor.dim()
        if dynamic and dim is not None:
            sizes[dim] = DimDynamic.DUCK
        made.append(mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)))
    return made


def trace(function: Callable[..., Any], fakes: Sequence[Any], *, stack_traces: bool = False) -> GraphModule:
    """The functional ATen graph, below autograd, of ``function`` on the fake tensors ``fakes``.

    Changes that the function makes to its inputs are copies at the graph's end.
    """
    made = _make_fx(function, fakes, stack_traces)
    schemas = (getattr(node.target, "_schema", None) for node in made.graph.nodes)
    if not any(schema is not None and schema.is_mutable for schema in schemas):
        return made
    with torch.no_grad():
        return _make_fx(torch.func.functionalize(Interpreter(made).run, remove="mutations"), fakes, False)


def size_conditions(fakes: Sequence[Any]) -> list[str]:
    """What a trace took for granted of the symbolic batch: a number it was fixed to, or a branch it took."""
    environment: Any = next(fake.fake_mode.shape_env for fake in fakes if isinstance(fake, FakeTensor))
    fixed = [f"{symbol} == {number}" for symbol, number in environment.replacements.items()]
    return fixed + [str(guard.expr) for guard in environment.guards]


def _batch_norm(source: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: float) -> Any:
    """``native_batch_norm``, whose schema does not say that it changes running statistics, as an op whose does."""
    if mean is None or variance is None or not training:
        return NotImplemented
    return aten._native_batch_norm_legit.default(source, weight, bias, mean, variance, training, *rest)


def _make_fx(function: Callable[..., Any], fakes: Sequence[Any], stack_traces: bool) -> GraphModule:
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), FakeTensorMode())
    with tracing_quirks(), mode, preserve_node_meta():
        made = make_fx(
            function,
            {aten.native_batch_norm.default: _batch_norm},
            tracing_mode="real",
            _allow_non_fake_inputs=True,
            record_stack_traces=stack_traces,
        )(*fakes)
    for node in made.graph.nodes:
        node.target = RELAXED.get(node.target, node.target)
    made.recompile()
    return made


def repeated(function: Callable[..., Any], ops: Iterable[Any], in_dims: tuple[int | None, ...]) -> Callable[..., Any]:
    """``vmap(function)``; a loop where one of the ``ops`` it runs is wrong under ``vmap``, or has no rule for it."""

    def loop(*arguments: Any) -> Any:
        count = next(a.shape[d] for a, d in zip(arguments, in_dims, strict=True) if d is not None)
        each = [
            function(*(a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims, strict=True)))
            for i in range(count)
        ]
        return pytree.tree_map(lambda *one: torch.stack(one), *each)

    def run(*arguments: Any) -> Any:
        try:
            with functorch_levels_closed():
                return torch.vmap(function, in_dims=in_dims)(*arguments)
        except RuntimeError as problem:
            if "batching rule" not in str(problem):
                raise
            return loop(*arguments)

    return loop if _WRONG_UNDER_VMAP.intersection(ops) else run


def compile_graph(graph_module: GraphModule, *, random: bool) -> Callable[..., Any]:
    """Inductor's compilation of a flat ATen graph; ``random`` keeps torch's own random number generator.

    CUDA graphs, where they are switched on for all of Inductor, stay off: what one run returns would be overwritten by
    the next, and outside of ``torch.compile`` nothing tells Inductor whose backward is still to come.
    """
    fakes = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    options = {"triton.cudagraphs": False, **({"fallback_random": True} if random else {})}
    with torch.no_grad(), tracing_quirks():
        # Imported here: it takes seconds, and warns about torch itself.
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(graph_module, fakes, config_patches=options)
        return compiled


def compile_plain(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor's compilation of a Dynamo graph. Its backward may run more than once."""
    from torch._inductor.compile_fx import compile_fx

    with torch._functorch.config.patch(donated_buffer=False):
        compiled: Any = compile_fx(graph_module, example_inputs)
        return compiled


def compile_in_place(module: nn.Module, backend: str, options: dict[str, Any]) -> None:
    """Let calls of ``module`` go through ``torch.compile``; an outer compilation breaks its graph there."""
    # Imported here: it takes a second.
    import torch._dynamo as dynamo
    from torch._dynamo.eval_frame import OptimizedModule

    if isinstance(module, OptimizedModule):
        found: Any = dynamo.lookup_backend(backend)
        context: Any = dynamo.optimize(backend=functools.partial(found, options=options))
        module.dynamo_ctx = context
        module._initialize()
        return
    # Not module.compile(), which does nothing for classes of torch's own, as Sequential.
    plain = module._call_impl

    def body(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    compiled: Any = torch.compile(body, backend=backend, options=options)

    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    # Of this function, not of the compiled one, which would be unwrapped to what was compiled.
    module._compiled_call_impl = dynamo.disable(call, recursive=False)


def boxed(graph_module: GraphModule) -> Callable[[list[Any]], Any]:
    """The same program, given its arguments in a list, which it empties: they are freed at their last use."""
    made = copy.deepcopy(graph_module)
    made.graph.set_codegen(_BoxedCodeGen())
    made.recompile()
    return made


def graph_kept() -> bool:
    """Whether the backward pass that is running was asked to retain the graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def source_name(node: torch.fx.Node) -> str:
    """Where Dynamo found the value of a placeholder, as ``L['self']._modules['fc']._parameters['weight']``."""
    source = getattr(node, "_dynamo_source", None)
    return "" if source is None else str(source.name() if callable(source.name) else source.name)


def tracing_artifacts() -> bool:
    """Whether ``TORCH_TRACE`` asks for structured traces."""
    # Torch has this handler from the start; it writes nothing where no folder is named.
    return any(isinstance(one, LazyTraceHandler) and one.root_dir is not None for one in trace_log.handlers)


def trace_artifact(name: str, payload: str) -> None:
    """A text in the structured trace, which tlparse shows under this name."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: payload,
        expect_trace_id=False,
    )


def product_flops(op: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Floating-point operations of a matrix product or convolution, two a multiply-add; 0 for any other op."""
    count = flop_registry.get(getattr(op, "overloadpacket", None))
    return 0 if count is None else count(*args, **kwargs, out_val=result)
