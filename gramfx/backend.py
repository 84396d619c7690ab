"""``torch.compile(model, backend="gramfx", options={...})``: plain training, and Gramians by ``gramfx.gramian``."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from gramfx.autograd import Region
from gramfx.capture import capture
from gramfx.errors import EagerRegionWarning, InputError, UnsupportedError
from gramfx.fitting import Planning
from gramfx.inside import Split, calls_of
from gramfx.jacobian import gramian
from gramfx.plan import parse_bytes
from gramfx.program import Call, Program, read_call
from gramfx.regions import CompiledRegion
from gramfx.source import warn_user
from gramfx.torch_compat import ambient_state, autocast_off, compile_plain, fake_batch_size, is_symbolic, source_name

_OPTIONS = ("compile", "memory_budget")
# Dynamo leaves its calls in the graph, for the backend to see.
torch.compiler.allow_in_graph(gramian)


def backend(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's.

    options: ``compile``, whether Inductor compiles the result, ``True`` by default; ``memory_budget``, as for
    :func:`gramfx.transform`. Raises :class:`gramfx.errors.InputError` for others, and for any ``mode`` but the default.
    """
    options = dict(options or {})
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise InputError("there is no such option", expected=", ".join(_OPTIONS), got=", ".join(unknown))
    if mode not in (None, "default"):
        raise InputError(
            "there is no such mode", expected="the default one", got=repr(mode), remedy="pass options={...}"
        )
    use_inductor = bool(options.get("compile", True))
    if calls_of(graph_module):
        split = Split(graph_module)
        return split.joined(backend(split.first, example_inputs, options=options))
    learns = any(isinstance(one, nn.Parameter) and one.requires_grad for one in example_inputs)
    if torch.is_grad_enabled() and learns:
        budget = options.get("memory_budget")
        planning = Planning(None if budget is None else parse_bytes(budget), compiled=use_inductor)
        return Regions(graph_module, example_inputs, planning, use_inductor)
    return compile_plain(graph_module, example_inputs) if use_inductor else graph_module


@dataclass(frozen=True)
class _Argument:
    """One placeholder: a ``parameter``, a ``buffer``, a tensor of ``data``, a ``size`` or a plain ``value``.

    ``name``: dotted, of the first two. ``like``: for a size, the placeholder and dim that have it.
    """

    kind: str
    name: str = ""
    like: tuple[int, int] | None = None


#: A capture, and for each of its slots the number of the argument that fills it, or the tensor itself.
Made = tuple[CompiledRegion, list[Any]]


class Regions:
    """One graph of Dynamo's, captured anew for each kind of arguments that comes."""

    def __init__(
        self, graph_module: GraphModule, example_inputs: Sequence[Any], planning: Planning, use_inductor: bool
    ) -> None:
        self.graph_module, self.planning, self.use_inductor = graph_module, planning, use_inductor
        nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        self.arguments = _arguments(nodes, example_inputs)
        self.symbolic = [_symbolic_first(node) for node in nodes]
        self.outputs = _Outputs(graph_module, nodes)
        self.made: dict[Hashable, Made | None] = {}
        #: Kinds of arguments that need a capture for each batch size.
        self.fixed: set[Hashable] = set()

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        """What the graph returns for these arguments."""
        data = self._of("data")
        batch, dims = _batch([given[i] for i in data], [self.symbolic[i] for i in data])
        call = read_call(tuple(given[i] for i in data), {}, (), dims)
        found = self._made(given, call)
        if found is None:
            returned: tuple[Any, ...] = self.graph_module(*given)
            return returned
        region, slots = found
        held = [given[slot] if isinstance(slot, int) else slot for slot in slots]
        tensors = [slot.seen(tensor) for slot, tensor in zip(region.captured.slots, held, strict=True)]
        wanted = [tensors[region.slots.index(node)] for node in region.wanted]
        return self.outputs.arranged(Region.apply(region, batch, tensors, *wanted), given)

    def _of(self, *kinds: str) -> list[int]:
        return [index for index, argument in enumerate(self.arguments) if argument.kind in kinds]

    def _made(self, given: Sequence[Any], call: Call) -> Made | None:
        """The capture for these arguments; ``None`` where there is none, and the graph runs as it is."""
        family, exact = self._key(given, call, dynamic=True), self._key(given, call, dynamic=False)
        several = call.batch_size is not None and call.batch_size > 1
        if several and family not in self.fixed and any(self.symbolic[i] for i in self._of("data")):
            try:
                if family not in self.made:
                    self.made[family] = self._compiled(given, call, dynamic=True)
                return self.made[family]
            except Exception:
                # Whatever torch cannot do with a symbol it may do with a number; if not, that raises below.
                self.fixed.add(family)
        if exact not in self.made:
            try:
                self.made[exact] = self._compiled(given, call, dynamic=False)
            except Exception as problem:
                self.made[exact] = None
                warn_user(EagerRegionWarning(f"a part of the model runs uncompiled: {problem}"))
        return self.made[exact]

    def _key(self, given: Sequence[Any], call: Call, *, dynamic: bool) -> Hashable:
        states = [
            (tuple(held.shape), held.dtype, held.device, held.requires_grad) if isinstance(held, Tensor) else held
            for held in (given[index] for index in self._of("parameter", "buffer", "value"))
        ]
        return dynamic, call.key(symbolic_batch=dynamic), tuple(states), ambient_state()

    def _compiled(self, given: Sequence[Any], call: Call, *, dynamic: bool) -> Made:
        if call.nested:
            raise UnsupportedError("nested tensors", remedy="use gramfx.transform for models of nested tensors")
        program = _RegionProgram(_RegionModel(self.graph_module, self.arguments, given, self.outputs.nodes))
        captured = capture(program, call, dynamic=dynamic)
        size = fake_batch_size(captured.graph_module) if dynamic else call.batch_size
        if dynamic and not is_symbolic(size):
            raise InputError("the region fixes the batch size")
        with autocast_off():
            region = CompiledRegion(captured, size, self.planning, self.use_inductor)
        paths = {f"model.{self.arguments[index].name}": index for index in self._of("parameter", "buffer")}
        data = self._of("data")
        slots: list[Any] = []
        for slot in captured.slots:
            if slot.kind == "input" and int(slot.key) < len(data):
                slots.append(data[int(slot.key)])
            elif slot.kind == "input":
                slots.append(program.loose[int(slot.key) - len(data)])
            else:
                slots.append(captured.constants[int(slot.key)] if slot.kind == "constant" else paths[str(slot.key)])
        return region, slots


def _arguments(nodes: Sequence[Node], example_inputs: Sequence[Any]) -> list[_Argument]:
    found: list[_Argument] = []
    names: set[str] = set()
    for node, example in zip(nodes, example_inputs, strict=True):
        source = source_name(node)
        if isinstance(example, nn.Parameter) or (isinstance(example, Tensor) and "._buffers[" in source):
            name = ".".join(re.findall(r"(?:_modules|_parameters|_buffers)\['([^']+)'\]", source)) or node.name
            name = node.name if name in names else name
            names.add(name)
            found.append(_Argument("parameter" if isinstance(example, nn.Parameter) else "buffer", name))
        elif isinstance(example, Tensor):
            found.append(_Argument("data"))
        elif like := _same_size(node, nodes):
            found.append(_Argument("size", like=like))
        else:
            found.append(_Argument("value"))
    return found


def _same_size(node: Node, nodes: Sequence[Node]) -> tuple[int, int] | None:
    """The placeholder and dim that have the size a placeholder stands for."""
    held = node.meta.get("example_value")
    if not isinstance(held, torch.SymInt):
        return None
    for index, other in enumerate(nodes):
        example = other.meta.get("example_value")
        for dim, size in enumerate(example.shape if isinstance(example, Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr == held.node.expr:
                return index, dim
    return None


def _symbolic_first(node: Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, Tensor) and example.dim() > 0 and is_symbolic(example.shape[0])


def _batch(data: Sequence[Tensor], symbolic: Sequence[bool]) -> tuple[int | None, tuple[int | None, ...]]:
    """A guess at the batch: the first tensor's first dim, one that varies if there is any.

    Whatever is taken for samples, it is proven, or tried at each call, that they are apart.
    """
    candidates = [t for t, flag in zip(data, symbolic, strict=True) if flag] or [t for t in data if t.dim()]
    if not candidates:
        return None, (None,) * len(data)
    size = candidates[0].shape[0]
    return size, tuple(0 if t.dim() and t.shape[0] == size else None for t in data)


class _Outputs:
    """What a graph returns: tensors once each, and how they and plain values make up the whole."""

    def __init__(self, graph_module: GraphModule, inputs: Sequence[Node]) -> None:
        returned: Any = next(node for node in graph_module.graph.nodes if node.op == "output").args[0]
        self.inputs = {node: index for index, node in enumerate(inputs)}
        self.returned = list(returned)
        tensors = [n for n in self.returned if isinstance(n, Node) and isinstance(n.meta.get("example_value"), Tensor)]
        self.nodes = list(dict.fromkeys(tensors))

    def arranged(self, made: Sequence[Tensor], given: Sequence[Any]) -> tuple[Any, ...]:
        """All that the graph returns."""
        tensors = dict(zip(self.nodes, made, strict=True))
        return tuple(
            tensors[one] if one in tensors else given[self.inputs[one]] if isinstance(one, Node) else one
            for one in self.returned
        )


@dataclass(frozen=True)
class _Held:
    graph_module: GraphModule
    arguments: Sequence[_Argument]
    given: Sequence[Any]
    outputs: Sequence[Node]


class _RegionModel(nn.Module):
    """Dynamo's graph as a module with the parameters and buffers that it was given, under their own names."""

    def __init__(
        self, graph_module: GraphModule, arguments: Sequence[_Argument], given: Sequence[Any], outputs: Sequence[Node]
    ) -> None:
        super().__init__()
        self._held = _Held(graph_module, arguments, given, outputs)
        for argument, held in zip(arguments, given, strict=True):
            if argument.kind in ("parameter", "buffer"):
                *path, last = argument.name.split(".")
                module: nn.Module = self
                for part in path:
                    if part not in module._modules:
                        module.add_module(part, nn.Module())
                    module = module.get_submodule(part)
                register = module.register_parameter if argument.kind == "parameter" else module.register_buffer
                register(last, held)

    def forward(self, *data: Tensor) -> tuple[Tensor, ...]:
        """The tensors that the graph returns, once each."""
        held, following = self._held, iter(data)
        values: list[Any] = []
        for argument, given in zip(held.arguments, held.given, strict=True):
            if argument.kind == "data":
                values.append(next(following))
            elif argument.kind in ("parameter", "buffer"):
                path, _, last = argument.name.rpartition(".")
                values.append(getattr(self.get_submodule(path), last))
            else:
                values.append(given)
        for index, argument in enumerate(held.arguments):
            if argument.like is not None:
                values[index] = values[argument.like[0]].shape[argument.like[1]]
        run = _Kept(held.graph_module, held.outputs)
        run.run(*values)
        return tuple(run.kept[node] for node in held.outputs)


class _Kept(Interpreter):
    """Runs a graph, its nodes in the user's source lines, and keeps some of its values."""

    def __init__(self, graph_module: GraphModule, nodes: Sequence[Node]) -> None:
        super().__init__(graph_module)
        self.wanted, self.kept = set(nodes), dict[Node, Any]()

    def run_node(self, n: Node) -> Any:
        made = super().run_node(n)
        if n in self.wanted:
            self.kept[n] = made
        return made


class _RegionProgram(Program):
    """Returns several tensors instead of objectives."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, None)

    def forward(self, *tensors: Tensor) -> Any:
        """Outputs of any dtype and shape."""
        return self.model(*tensors[: len(tensors) - len(self.loose)])
