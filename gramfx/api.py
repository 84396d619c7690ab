"""``gramfx.transform`` and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.fx import GraphModule

from gramfx.agreement import confirm, probe_of, settle
from gramfx.artifacts import record
from gramfx.attributes import plain_state, put_back
from gramfx.capture import capture
from gramfx.captured import Captured
from gramfx.discovery import Attribute, modules_of, state_key, tensor_attributes
from gramfx.distributed import Averaging
from gramfx.errors import InputError, StaticBatchWarning
from gramfx.fitting import Lowering, Planning, replanned
from gramfx.kept import Captures, Families, Made
from gramfx.measure import fastest_measured
from gramfx.passes.plan_contractions import fastest_predicted
from gramfx.pipeline import STAGES, lower
from gramfx.plan import Plan, parse_bytes
from gramfx.program import Call, InDims, Program, read_call
from gramfx.readings import ReadingChangedError, may_fit, unsteady
from gramfx.runtime import Compiled
from gramfx.source import warn_user
from gramfx.torch_compat import ambient_state, autocast_off, fake_batch_size, is_symbolic
from gramfx.uses import StaticBatchNeeded
from gramfx.view import StageView, view
from gramfx.view.text import text

Objective = Callable[..., Tensor]


class Stage:
    """One stage of a transformed model: a graph to read, run, save or compile elsewhere."""

    def __init__(self, name: str, graph_module: GraphModule, view: StageView) -> None:
        self.name, self.graph_module, self.view = name, graph_module, view

    def __str__(self) -> str:
        return text(self.view)

    def print(self) -> None:
        """Print one node a line: name, op, axes, what it reads, what it is there for, module path."""
        print(self)


class Step(nn.Module):
    """``objectives, gramian = step(*args, **kwargs)``; made by :func:`transform`.

    A module around the model: ``parameters()``, ``to()``, ``train()`` and ``eval()`` act on the model, and
    ``state_dict()`` is the model's own.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        objective: Objective | None,
        in_dims: InDims,
        reuse: Literal["exact", "separate"],
        coupled: Literal["warn", "error"],
        compile: bool,
        dynamic: bool | None,
        planning: Planning,
    ) -> None:
        super().__init__()
        self.model, self.objective, self.in_dims = model, objective, in_dims
        if not isinstance(model, nn.Module):
            self.reached = nn.ModuleList(modules_of(model))
        self._reuse, self._coupled, self._inductor, self._dynamic = reuse, coupled, compile, dynamic
        self._planning = planning
        #: Whether new captures and plans are tried against the model itself; ``capture`` runs nothing without.
        self.trial = True
        self._captures = Captures()
        self._families = Families()
        self._assigned: set[Attribute] = set()
        self._last: Compiled | None = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state."""
        held = self.model if isinstance(self.model, nn.Module) else self.reached
        return held.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's state."""
        held = self.model if isinstance(self.model, nn.Module) else self.reached
        return held.load_state_dict(*args, **kwargs)

    def forward(self, *args: Any, targets: Any = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The objectives and the Gramian of their Jacobian.

        Returns objectives of any shape, differentiable, and ``J Jᵀ`` of shape ``[m, m]``, ``m = objectives.numel()`` in
        row-major order, in the parameters' dtype. ``targets`` are passed to the objective after the model's output, a
        tuple one by one. Raises a :class:`gramfx.errors.GramfxError` where the answer would not be exact.
        """
        call = self._read(args, kwargs, targets)
        averaging: Averaging | None = None
        seen: Sequence[Tensor] = ()
        for compiled, program in self._candidates(call):
            # What is read decides which capture serves, and each that does not has read more of it.
            if may_fit(compiled.captured.readings, seen):
                averaging = averaging or Averaging(program)
                try:
                    return compiled(program, [*call.tensors, *program.loose], averaging)
                except ReadingChangedError as changed:
                    seen = changed.seen
        raise unsteady()

    def capture(self, *args: Any, targets: Any = None, **kwargs: Any) -> Step:
        """Compile for arguments like these, and try it once against the model; returns the step itself."""
        self._serving(self._read(args, kwargs, targets))
        return self

    def arguments(self, *args: Any, targets: Any = None, **kwargs: Any) -> list[Tensor]:
        """The tensors that the graph modules of the stages take for this call, in order of their placeholders."""
        call = self._read(args, kwargs, targets)
        compiled, program = self._serving(call)
        return compiled.captured.fetch(program, [*call.tensors, *program.loose])

    def stage(self, name: str) -> Stage:
        """The graph after a stage of the latest call or capture: one of ``gramfx.STAGES``."""
        if name not in STAGES:
            raise InputError("there is no such stage", expected=", ".join(STAGES), got=repr(name))
        lowering = self.lowering
        return Stage(name, lowering.stages[name], view(lowering, name))

    @property
    def lowering(self) -> Lowering:
        """Everything about the latest call or capture."""
        if self._last is None:
            raise InputError("nothing was captured yet", remedy="call the step, or step.capture(...), first")
        return self._last.lowering

    @property
    def plan(self) -> Plan:
        """How the latest call or capture contracts each parameter, and what that costs."""
        plan = self.lowering.plan
        assert plan is not None
        return plan

    @property
    def captures(self) -> int:
        """How many graphs are kept, at most 64."""
        return len(self._captures)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any) -> Call:
        if targets is not None and self.objective is None:
            raise InputError("targets were given, but there is no objective", remedy="pass objective= to transform")
        unpacked = () if targets is None else targets if isinstance(targets, tuple) else (targets,)
        return read_call(args, kwargs, unpacked, self.in_dims)

    def _serving(self, call: Call) -> tuple[Compiled, Program]:
        """The capture for a call, and the program that it is of."""
        for compiled, program in self._candidates(call):
            if compiled.serves(program, [*call.tensors, *program.loose]):
                return compiled, program
        raise unsteady()

    def _candidates(self, call: Call) -> Iterator[tuple[Compiled, Program]]:
        """Captures that may serve a call: kept ones, several where the model reads values, then a new one."""
        family, exact, kept = self._keys(call)
        dynamic = self._wants_dynamic(call, family)
        reads = False
        for key in ((dynamic, family if dynamic else exact), (False, exact)):
            for made in self._captures.under(key):
                reads = bool(made[0][0].captured.readings)
                yield self._latest(made, call)
                if not reads:
                    return
        yield self._latest(self._make(call, kept, dynamic and not reads, reads), call)

    def _latest(self, made: list[Made], call: Call) -> tuple[Compiled, Program]:
        self._last, program = self._planned(made, call)
        return self._last, program

    def _planned(self, made: list[Made], call: Call) -> tuple[Compiled, Program]:
        """The capture with a plan for this batch size, planned and tried now where there is none yet."""
        batch = call.batch_size
        for compiled, program, _ in made:
            # A capture without a batch, or for one size alone, has one plan.
            if batch is None or compiled.static or batch in compiled.plan.regime:
                return compiled, program
        assert batch is not None
        compiled, program, kept = made[0]
        captured = compiled.captured
        with autocast_off():
            lowering = replanned(compiled.lowering, batch, self._planning)
        record(lowering)
        if self.trial and self._reuse == "exact":
            confirm(captured, lowering.stages["lowered"], program, call, probe_of(captured, program, call))
        made.append((Compiled(captured, lowering, self._inductor), program, kept))
        return made[-1][:2]

    def _keys(self, call: Call) -> tuple[Hashable, Hashable, list[Any]]:
        """The key of calls that differ in batch size alone, that of calls like this, and what must stay alive."""
        state, kept = state_key([self.model, self.objective], self._assigned)
        own = {id(tensor) for tensor in (*self.parameters(), *self.buffers())}
        around = (state, tuple(id(t) if id(t) in own else None for t in call.tensors), ambient_state())
        return (call.key(symbolic_batch=True), around), (call.key(symbolic_batch=False), around), kept

    def _wants_dynamic(self, call: Call, family: Hashable) -> bool:
        size = call.batch_size
        if size is None or size < 2 or self._dynamic is False:
            return False
        first = self._families.first(family, size)
        if first is None:
            return False
        if call.nested:
            self._families.fix(family)
            if self._dynamic:
                warn_user(StaticBatchWarning("one capture per batch of nested tensors: the number of rows is baked in"))
            return False
        return bool(self._dynamic) or first != size

    def _make(self, call: Call, kept: list[Any], dynamic: bool, reads: bool) -> list[Made]:
        """Capture and lower, with a symbolic batch if asked for and possible, else for this batch size alone."""
        before, program = tensor_attributes(self), Program(self.model, self.objective)
        found = plain_state(program)
        made, reason = None, ""
        if dynamic:
            try:
                made = (*self._lowered(call, dynamic=True), kept)
            except Exception as problem:
                # Whatever torch cannot do with a symbol it may do with a number; if not, that raises below.
                reason = str(problem).partition("\n")[0]
                put_back(found)
        static = made is None
        made = made or (*self._lowered(call, dynamic=False, reads=reads), kept)
        after = tensor_attributes(self)
        self._assigned |= {name for name in after if name not in before or before[name][1] is not after[name][1]}
        family, exact, _ = self._keys(call)
        self._captures.add((False, exact) if static else (True, family), [made])
        if dynamic and static:
            self._families.fix(family)
            if self._dynamic:
                warn_user(StaticBatchWarning(f"one capture per batch size: {reason}"))
        return [made]

    def _lowered(self, call: Call, *, dynamic: bool, reads: bool = False) -> tuple[Compiled, Program]:
        program = Program(self.model, self.objective)
        captured: Captured = capture(program, call, dynamic=dynamic, trial=self.trial, reads=reads)
        size = fake_batch_size(captured.graph_module) if dynamic else call.batch_size
        if dynamic and not is_symbolic(size):
            raise StaticBatchNeeded("the model fixes the batch size")
        exact = self._reuse == "exact"
        with autocast_off():
            lowering = lower(captured, size, exact=exact, coupled=self._coupled, planning=self._planning)
        record(lowering)
        if self.trial and exact:
            confirm(captured, lowering.stages["lowered"], program, call)
        if captured.readings:
            settle(captured, lowering.stages["lowered"], program, call)
        program.call = None
        # A compilation takes longer than the calls with one reading that come between two others.
        return Compiled(captured, lowering, self._inductor and not captured.readings), program


def transform(
    model: Callable[..., Any],
    objective: Objective | None = None,
    in_dims: InDims = 0,
    reuse: Literal["exact", "separate"] = "exact",
    coupled: Literal["warn", "error"] = "warn",
    compile: bool = True,
    dynamic: bool | None = None,
    memory_budget: int | str | None = None,
    plan: Plan | Literal["measure"] | None = None,
) -> Step:
    """A step that computes a model's objectives and the Gramian ``G = J Jᵀ`` of their Jacobian in one pass.

    ``J[i] = ∂ objectives.flatten()[i] / ∂ (trainable parameters)``; ``J`` itself is never formed.

    model: a module, or a callable over modules. Its parameters are shared, not copied.
    objective: from the model's output (and the targets given to the step) to a tensor of objectives of any shape;
        ``None`` where the output is that tensor.
    in_dims: which dim of each positional input holds the samples, as in ``torch.vmap``; ``None`` for no samples.
        Keyword arguments and targets hold theirs on dim 0 unless it is ``None``.
    reuse: ``"exact"`` for the true Gramian, cross terms between uses of one parameter included; ``"separate"`` for
        ``Σ_uses J_u J_uᵀ``.
    coupled: ``"warn"`` or ``"error"``, where an op makes objectives depend on other samples. Exact either way.
    compile: whether Inductor compiles the result.
    dynamic: ``True`` for one graph for all batch sizes of at least 2, ``False`` for one per size, ``None`` for static
        until a second size is seen.
    memory_budget: bytes above what a plain forward and backward needs that the step may use, a number or a string as
        ``"512MiB"``; ``None`` for a tenth of that need, at least 64 MiB.
    plan: a plan made before (``step.plan``), taken for the batch sizes it holds for instead of planning; ``"measure"``
        to time the best candidates on the device and keep the fastest; ``None`` to go by predicted times.

    The step raises :class:`gramfx.errors.MemoryBudgetError` where no plan keeps the budget. Raises
    :class:`gramfx.errors.InputError` for options that do not exist; the step raises when called.
    """
    for name, given, known in (("reuse", reuse, ("exact", "separate")), ("coupled", coupled, ("warn", "error"))):
        if given not in known:
            raise InputError(f"{name} has no such value", expected=" or ".join(map(repr, known)), got=repr(given))
    if not callable(model):
        raise InputError("the model cannot be called", expected="a module or a function", got=type(model).__name__)
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    if not (plan is None or plan == "measure" or isinstance(plan, Plan)):
        raise InputError("plan is no plan", expected="a gramfx.Plan, 'measure' or None", got=repr(plan))
    order = fastest_measured if plan == "measure" else fastest_predicted
    planning = Planning(budget, plan if isinstance(plan, Plan) else None, order, compile)
    return Step(model, objective, in_dims, reuse, coupled, compile, dynamic, planning)
