"""Every error and warning of gramfx, as one tree.

GramfxError
├── InputError                 a call's arguments do not fit
│   └── BatchSizeError         inputs that should share a batch do not
├── ObjectiveError             the objectives have no real Jacobian
├── NoTrainableParameterError  there is nothing to differentiate by
├── CaptureError               the model cannot be turned into a graph
│   ├── DataDependentError     control flow or a shape depends on tensor values that cannot be followed
│   ├── CustomFunctionError    a hand-written torch.autograd.Function
│   ├── ParameterMutationError the forward changes a trainable parameter
│   └── CaptureMismatchError   the captured graph does not differentiate as the model does
├── CoupledObjectivesError     coupled="error" and an op couples the samples
├── MemoryBudgetError          no plan keeps the memory budget
├── UnsupportedError           captured, but gramfx has no exact way to go on
└── VerificationError          a stage broke its own promise: a bug in gramfx

CoupledObjectivesWarning       objectives are coupled; exact, at the price of more cotangents
StaticBatchWarning             a symbolic batch was asked for and cannot be had
DenseJacobianWarning           rows of the Jacobian are formed for some parameters; exact, and slow
EagerRegionWarning             a part of a model compiled with backend="gramfx" runs as it is
RecaptureWarning               calls differ so much that many graphs were captured
"""


class GramfxError(Exception):
    """What went wrong, then what was expected, what was got, where, and what to do about it."""

    def __init__(
        self,
        problem: str,
        *,
        expected: str | None = None,
        got: str | None = None,
        where: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.problem, self.expected, self.got, self.where, self.remedy = problem, expected, got, where, remedy
        rows = (("expected", expected), ("got", got), ("where", where), ("what to do", remedy))
        super().__init__("\n".join([problem, *(f"  {name}: {text}" for name, text in rows if text)]))


class InputError(GramfxError):
    """A call's arguments do not fit."""


class BatchSizeError(InputError):
    """Inputs that should share a batch do not."""


class ObjectiveError(GramfxError):
    """The objectives have no real Jacobian."""


class NoTrainableParameterError(GramfxError):
    """There is nothing to differentiate by."""


class CaptureError(GramfxError):
    """The model cannot be turned into a graph."""


class DataDependentError(CaptureError):
    """Control flow or a shape depends on tensor values, in a way that cannot be followed."""


class CustomFunctionError(CaptureError):
    """The model runs a hand-written ``torch.autograd.Function``."""


class ParameterMutationError(CaptureError):
    """The forward changes a trainable parameter."""


class CaptureMismatchError(CaptureError):
    """The captured graph does not differentiate as the model does."""


class CoupledObjectivesError(GramfxError):
    """An op couples the samples, and ``coupled="error"`` was asked for."""


class MemoryBudgetError(GramfxError):
    """No plan keeps the memory budget. ``least``: the budget that would do, in bytes."""

    def __init__(self, least: int, budget: int, where: str) -> None:
        self.least = least
        super().__init__(
            "no plan keeps the memory budget",
            expected=f"at least {least} bytes above a plain forward and backward",
            got=f"memory_budget={budget} bytes",
            where=where,
            remedy=f"pass memory_budget={least} or more, or a smaller batch",
        )


class UnsupportedError(GramfxError):
    """The graph was captured, but there is no exact way to go on."""


class VerificationError(GramfxError):
    """A stage broke its own promise: a bug in gramfx."""


class CoupledObjectivesWarning(UserWarning):
    """Objectives are coupled: exact, at the price of one cotangent per objective."""


class StaticBatchWarning(UserWarning):
    """A symbolic batch was asked for and cannot be had: one capture per batch size."""


class DenseJacobianWarning(UserWarning):
    """Rows of the Jacobian are formed one by one, for parameters that several regions read, or code outside of them."""


class EagerRegionWarning(UserWarning):
    """A part of a model compiled with ``backend="gramfx"`` could not be captured, and runs uncompiled."""


class RecaptureWarning(UserWarning):
    """Calls differ in shapes or in what is read of them, or the model in its state: many graphs were captured."""
