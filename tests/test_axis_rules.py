"""Every axis rule against the op itself, over torch's own sample inputs.

The batch is put into some dim of the inputs, the analysis says which samples of each output depend on which samples of
each input, and autograd says whether that is so: with a cotangent on the rows of one sample, the gradient must be zero,
exactly, on the rows of all others.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from gramfx.axes import Loc, Value
from gramfx.passes.trace_axes import propagate, sweep
from gramfx.rules import axis_rule, table

SAMPLES = {"forward": 2, "backward": 1}
PLACEMENTS = 6
CLAIMS = 3_000
FALSE_ALARMS = 430
OPS_WITH_RULES = 590

OPS = {f"{op.name}{'.' if op.variant_test_name else ''}{op.variant_test_name}": op for op in op_db}
UNTRACEABLE = {
    "item": "reads a number out of a tensor",
    "allclose": "reads a number out of a tensor",
    "equal": "reads a number out of a tensor",
    "nn.functional.gaussian_nll_loss": "reads a number out of a tensor",
    "sparse.sampled_addmm": "sparse tensors",
    "sparse.mm.reduce": "sparse tensors",
    "to_sparse": "sparse tensors",
    "svd_lowrank": "a composite of ops that have their own samples, slow",
    "pca_lowrank": "a composite of ops that have their own samples, slow",
    "as_strided.partial_views": "reads beyond its argument",
    "jiterator_unary": "needs a GPU",
    "jiterator_binary": "needs a GPU",
    "jiterator_4inputs_with_extra_args": "needs a GPU",
    "jiterator_binary_return_by_ref": "needs a GPU",
    "jiterator_2inputs_2outputs": "needs a GPU",
}
UNTRACEABLE_GRADIENTS = {"corrcoef": "reads a number out of a tensor", "cov": "reads a number out of a tensor"}


@dataclass
class Findings:
    """What one op's samples showed: claims that held, flags that were needless, claims that were wrong."""

    claims: int = 0
    flags: int = 0
    false_alarms: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    ops: set[str] = field(default_factory=set)


@contextmanager
def no_collection() -> Iterator[None]:
    """Generators collected while a graph is recorded would leave their grad-mode switches in it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny ops only lose time to more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Function = Callable[..., Any]


def calls(op: Any, limit: int) -> list[tuple[Function, list[torch.Tensor]]]:
    """Functions of tensors alone, and those tensors, from an op's first sample inputs that hold few entries."""
    torch.manual_seed(0)
    found: list[tuple[Function, list[torch.Tensor]]] = []
    generator = op.sample_inputs("cpu", torch.float64, requires_grad=False)
    for sample in itertools.islice(generator, 40):
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or sum(t.numel() for t in tensors) > 4000 or max(t.numel() for t in tensors) < 2:
            continue

        def run(*given: torch.Tensor, leaves: Any = leaves, spec: Any = spec) -> Any:
            left = iter(given)
            filled = [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            first, args, kwargs = tree_unflatten(filled, spec)
            return op.op(first, *args, **kwargs)

        found.append((run, tensors))
    if hasattr(generator, "close"):
        generator.close()
    step = max(len(found) // limit, 1)
    return found[::step][:limit]


def is_float(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def differentiable(run: Function, tensors: list[torch.Tensor]) -> set[int]:
    """The inputs torch can differentiate the outputs by."""
    found: set[int] = set()
    for at, tensor in enumerate(tensors):
        if is_float(tensor):
            inputs = [t.clone().requires_grad_() if i == at else t for i, t in enumerate(tensors)]
            try:
                results = [r for r in tree_flatten(run(*inputs))[0] if is_float(r) and r.requires_grad]
                grads = torch.autograd.grad(
                    results, [inputs[at]], [torch.ones_like(r) for r in results], allow_unused=True
                )
            except RuntimeError:  # torch has no derivative here
                continue
            found |= {at} if grads[0] is not None else set()
    return found


def backward_of(run: Function, tensors: list[torch.Tensor]) -> tuple[Function, list[torch.Tensor]] | None:
    """The gradients of an op's first differentiable output as a function of its inputs and the cotangent."""
    sources = differentiable(run, tensors)
    if not sources:
        return None

    def forward(*given: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        inputs = [t.detach().requires_grad_() if at in sources else t for at, t in enumerate(given)]
        results = tree_flatten(run(*inputs))[0]
        return [inputs[at] for at in sorted(sources)], next(r for r in results if is_float(r) and r.requires_grad)

    def gradients(*given: torch.Tensor) -> list[torch.Tensor]:
        inputs, result = forward(*given[:-1])
        return [g for g in torch.autograd.grad(result, inputs, given[-1], allow_unused=True) if g is not None]

    return gradients, [*tensors, torch.randn_like(forward(*tensors)[1].detach())]


def samples_of(shape: torch.Size, loc: Loc, batch: int) -> torch.Tensor:
    """The sample each entry belongs to, as a tensor that broadcasts to ``shape``."""
    owner = torch.arange(shape[loc.dim]) // int(loc.inner) % batch
    return owner.reshape([-1 if dim == loc.dim else 1 for dim in range(len(shape))])


def placements(tensors: list[torch.Tensor]) -> list[tuple[int, dict[int, Loc]]]:
    """Batch sizes and where the batch lies in each input: in one alone, or in all that have the same dim."""
    found: list[tuple[int, dict[int, Loc]]] = []
    for at, tensor in enumerate(tensors):
        if not is_float(tensor):
            continue
        for dim, size in enumerate(tensor.shape):
            for inner, batch in {(1, size), (2, size // 2), (1, size // 2)}:
                if batch < 2 or size % (inner * batch):
                    continue
                alone = {at: Loc(dim, inner)}
                left = {i: Loc(dim, inner) for i, t in enumerate(tensors) if t.dim() > dim and t.shape[dim] == size}
                from_right = tensor.dim() - dim
                right = {
                    i: Loc(t.dim() - from_right, inner)
                    for i, t in enumerate(tensors)
                    if t.dim() >= from_right and t.shape[-from_right] == size
                }
                found += [(batch, p) for p in (alone, left, right)]
    distinct = list({str(placement): placement for placement in found}.values())
    random.Random(0).shuffle(distinct)
    return distinct[:PLACEMENTS]


def crosses(result: torch.Tensor, given: torch.Tensor, place: Loc | None, loc: Loc, batch: int) -> bool:
    """Whether rows of one sample of the result depend on rows of another of the input; on any rows without a place."""
    if not result.requires_grad:
        return False
    cotangent = torch.randn_like(result)
    owner = samples_of(given.shape, loc, batch)
    for sample in (0, batch - 1):
        rows = cotangent
        if place is not None:
            rows = torch.where(samples_of(result.shape, place, batch) == sample, cotangent, torch.zeros_like(cotangent))
        (grad,) = torch.autograd.grad(result, [given], rows, retain_graph=True, allow_unused=True)
        others = owner != sample if place is not None else torch.ones_like(owner, dtype=torch.bool)
        if grad is not None and grad.is_sparse:
            grad = grad.to_dense()
        if grad is not None and (others & (grad != 0) & ~grad.isnan()).any():
            return True
    return False


def examine_graph(graph_module: GraphModule, tensors: list[torch.Tensor], findings: Findings) -> None:
    """Compare the analysis with autograd at every placement of the batch."""
    sources = differentiable(graph_module, tensors)
    inputs = [t.clone().requires_grad_() if at in sources else t for at, t in enumerate(tensors)]
    results = tree_flatten(graph_module(*inputs))[0]
    names = graph_module.graph.find_nodes(op="placeholder")
    outputs = tree_flatten(graph_module.graph.output_node().args[0])[0]
    for batch, places in placements(tensors):
        values = {
            node.name: Value(tuple(t.shape), at in sources, places.get(at))
            for at, (node, t) in enumerate(zip(names, tensors, strict=True))
        }
        flags = propagate(graph_module, values, batch)
        for node, result in zip(outputs, results, strict=True):
            if isinstance(node, Node) and is_float(result) and result.numel():
                coupled = sweep(graph_module.graph, flags, node).coupled
                value = node.meta["axes"]
                for at, loc in places.items():
                    if at in sources:
                        judge(
                            findings,
                            graph_module,
                            node,
                            names[at],
                            result,
                            inputs[at],
                            value,
                            loc,
                            batch,
                            names[at] in coupled,
                        )


def judge(
    findings: Findings,
    graph_module: GraphModule,
    node: Node,
    operand: Node,
    result: torch.Tensor,
    given: torch.Tensor,
    value: Value,
    loc: Loc,
    batch: int,
    flagged: bool,
) -> None:
    """Count one (output, input) edge: a claim must hold, a flag should be needed."""
    place = value.batch if value.differentiable else None
    if not flagged:
        findings.claims += 1
        if crosses(result, given, place, loc, batch):
            shapes = f"{tuple(given.shape)} {loc} -> {tuple(result.shape)} {place}, batch {batch}"
            findings.wrong.append(f"{node.name} of {operand.name}: {shapes}\n{graph_module.graph}")
        return
    findings.flags += 1
    candidates = (
        [place]
        if place
        else [
            Loc(d, i)
            for d, size in enumerate(result.shape)
            for i in {1, 2, int(loc.inner)}
            if size and size % (i * batch) == 0
        ]
    )
    if any(not crosses(result, given, candidate, loc, batch) for candidate in candidates):
        findings.false_alarms[str(node.target)] += 1


@cache
def examine(name: str, variant: str) -> Findings:
    """All findings on one op: on its own graph, or on the graph of its gradients."""
    op, findings = OPS[name], Findings()
    with no_collection():
        for run, tensors in calls(op, SAMPLES[variant]):
            if variant == "backward":
                if (gradients := backward_of(run, tensors)) is None:
                    continue
                run, tensors = gradients
            graph_module = make_fx(run, pre_dispatch=variant == "forward")(*tensors)
            targets = [n.target for n in graph_module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
            if any(target._schema.is_mutable for target in targets):
                continue
            findings.ops |= {str(target) for target in targets if axis_rule(target)}
            examine_graph(graph_module, tensors, findings)
    return findings


def cases(variant: str) -> list[str]:
    """The ops whose samples can be traced and, for their gradients, differentiated twice."""
    plain = [n for n, op in OPS.items() if n not in UNTRACEABLE and op.supports_dtype(torch.float64, "cpu")]
    twice = [
        n for n in plain if OPS[n].supports_autograd and OPS[n].supports_gradgrad and n not in UNTRACEABLE_GRADIENTS
    ]
    return plain if variant == "forward" else twice


@pytest.mark.filterwarnings("ignore")  # torch's own, of ops that are deprecated, in beta, or given odd samples
@pytest.mark.parametrize("name", cases("forward"))
def test_rule_agrees_with_the_op(name: str) -> None:
    assert not examine(name, "forward").wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", cases("backward"))
def test_rules_agree_with_the_ops_gradients(name: str) -> None:
    assert not examine(name, "backward").wrong


@pytest.mark.slow  # examines all over again what other processes have examined
@pytest.mark.filterwarnings("ignore")
def test_claims_are_many_and_false_alarms_few() -> None:
    """Rules that flagged everything would agree with every op: the claims must stay, the needless flags not grow."""
    found = [examine(name, variant) for variant in ("forward", "backward") for name in cases(variant)]
    alarms = sum((f.false_alarms for f in found), Counter[str]())
    assert sum(f.claims for f in found) >= CLAIMS
    assert alarms.total() <= FALSE_ALARMS, alarms.most_common(20)
    assert len(set().union(*(f.ops for f in found))) >= OPS_WITH_RULES


BROKEN: dict[str, tuple[str, table.Rule]] = {
    "a softmax that keeps its entries apart": ("softmax", table.broadcast),
    "a scan that keeps its entries apart": ("cumsum", table.broadcast),
    "a sort that moves nothing": ("msort", table.broadcast),
    "a flip that moves nothing": ("flip", table.broadcast),
    "a roll that moves nothing": ("roll", table.broadcast),
    "a norm that keeps its entries apart": ("nn.functional.layer_norm", table.broadcast),
    "a sum that has no derivative": ("logsumexp", lambda call: call.constant()),
    "attention that takes keys for queries": (
        "nn.functional.scaled_dot_product_attention",
        table.equation("...qd, ...qd, ...qd, ...qk -> ...qd"),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_noticed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, rule = BROKEN[case]
    monkeypatch.setitem(table.AXIS_RULES, f"aten.{name.split('.')[-1]}", rule)
    assert examine.__wrapped__(name, "forward").wrong
