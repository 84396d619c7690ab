"""Every refusal: one of our errors, with what was expected, what was got, where, and what to do; nothing is changed."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramfx
from gramfx import errors
from tests import reference


class Model(nn.Module):
    """A linear layer, a counter, and a function of the layer, the input and the counter."""

    layer: nn.Linear
    count: Tensor

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(3, 2), function
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return self.function(self, x)


def distinct_rows(model: Model, x: Tensor) -> Tensor:
    return model.layer(x).sum() * x.unique(dim=0)


def in_place(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.layer.weight.mul_(0.5)
    return model.layer(x)


class Renormalised(nn.Module):
    """An embedding that rewrites its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, 0] > 0).long())


def complex_layer() -> nn.Module:
    model = Model(lambda m, x: m.layer(x.to(torch.complex64)).abs())
    model.layer = nn.Linear(3, 2, dtype=torch.complex64)
    return model


REFUSED = [
    ("unknown_size", lambda: Model(distinct_rows), errors.DataDependentError, "unique_dim"),
    ("parameter_in_place", lambda: Model(in_place), errors.ParameterMutationError, "layer.weight"),
    ("max_norm", Renormalised, errors.ParameterMutationError, "max_norm"),
    (
        "complex",
        lambda: Model(lambda m, x: torch.complex(m.layer(x), m.layer(x))),
        errors.ObjectiveError,
        "view_as_real",
    ),
    ("integer", lambda: Model(lambda m, x: m.layer(x).argmax(1)), errors.ObjectiveError, "int64"),
    ("detached", lambda: Model(lambda m, x: m.layer(x).detach()), errors.ObjectiveError, "does not require grad"),
    ("no_tensor", lambda: Model(lambda m, x: {"y": m.layer(x)}), errors.ObjectiveError, "objective="),
    ("frozen", lambda: Model(lambda m, x: m.layer(x)).requires_grad_(False), errors.NoTrainableParameterError, "none"),
    ("python_random", lambda: Model(lambda m, x: m.layer(x) * random.random()), errors.CaptureError, "torch.rand"),
    (
        "random_gradient",
        lambda: Model(lambda m, x: F.rrelu(m.layer(x), training=True)),
        errors.UnsupportedError,
        "rrelu",
    ),
]


@pytest.mark.parametrize(("build", "kind", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused_and_nothing_is_changed(build: Callable[[], nn.Module], kind: type[Exception], words: str) -> None:
    torch.manual_seed(0)
    model, x = build(), torch.randn(4, 3)
    model.zero_grad()
    before, python = reference.snapshot(model), random.getstate()
    with pytest.raises(errors.GramfxError) as caught:
        gramfx.transform(model, compile=False)(x)
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert caught.value.remedy
    assert reference.differences(before, reference.snapshot(model)) == []
    assert random.getstate() == python


def test_the_users_line_is_named() -> None:
    with pytest.raises(errors.DataDependentError) as caught:
        gramfx.transform(Model(distinct_rows), compile=False)(torch.randn(4, 3))
    assert caught.value.where is not None
    assert "test_errors.py" in caught.value.where and "in distinct_rows" in caught.value.where


def test_coupling_names_op_module_and_line() -> None:
    model = Model(lambda m, x: m.layer(x) - m.layer(x).mean(0))
    with pytest.raises(errors.CoupledObjectivesError) as caught:
        gramfx.transform(model, coupled="error", compile=False)(torch.randn(4, 3))
    assert caught.value.where is not None
    assert "aten.mean" in caught.value.where and "test_errors.py" in caught.value.where
    coupled = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.warns(errors.CoupledObjectivesWarning, match=r"batch_norm.*module '1'"):
        gramfx.transform(coupled, compile=False)(torch.randn(4, 3))


CALLS = [
    ("batch_sizes", {}, (torch.zeros(4, 3), torch.zeros(5, 3)), {}, errors.BatchSizeError, "(5, 3)"),
    ("in_dims_length", {"in_dims": (0,)}, (torch.zeros(4, 3), torch.zeros(4, 3)), {}, errors.InputError, "1 entries"),
    ("in_dims_dim", {"in_dims": 2}, (torch.zeros(4, 3), torch.zeros(4, 3)), {}, errors.InputError, "2"),
    (
        "targets",
        {},
        (torch.zeros(4, 3), torch.zeros(4, 3)),
        {"targets": torch.zeros(4)},
        errors.InputError,
        "objective",
    ),
    ("sparse", {}, (torch.zeros(4, 3).to_sparse(), torch.zeros(4, 3)), {}, errors.UnsupportedError, "sparse"),
]


@pytest.mark.parametrize(
    ("options", "args", "kwargs", "kind", "words"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS]
)
def test_arguments_that_do_not_fit(
    options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[Exception], words: str
) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a) + self.layer(b)

    with pytest.raises(errors.GramfxError) as caught:
        gramfx.transform(Two(), compile=False, **options)(*args, **kwargs)
    assert type(caught.value) is kind and words in str(caught.value)


def test_options_that_do_not_exist() -> None:
    with pytest.raises(errors.InputError, match="'exact' or 'separate'"):
        gramfx.transform(nn.Linear(2, 2), reuse="both")  # type: ignore[arg-type]
    with pytest.raises(errors.InputError, match="cannot be called"):
        gramfx.transform(3)  # type: ignore[arg-type]
    with pytest.raises(errors.InputError, match="captured, canonical"):
        gramfx.transform(nn.Linear(2, 2)).stage("compiled")
    with pytest.raises(errors.InputError, match="nothing was captured"):
        gramfx.transform(nn.Linear(2, 2)).stage("lowered")


def test_a_users_own_error_passes_through() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        gramfx.transform(nn.Linear(3, 2), compile=False)(torch.randn(4, 5))


def test_errors_are_one_tree() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    drawn = errors.__doc__ or ""
    for kind in kinds:
        assert kind.__name__ in drawn
        assert issubclass(kind, (errors.GramfxError, UserWarning))


def test_message_has_all_parts() -> None:
    shown = str(errors.InputError("no", expected="a", got="b", where="c", remedy="d"))
    assert shown.splitlines() == ["no", "  expected: a", "  got: b", "  where: c", "  what to do: d"]


def test_the_users_line_is_found_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gramfx"
    folder.mkdir()
    (folder / "mine.py").write_text("def centred(model, x):\n    return model.layer(x) - model.layer(x).mean(0)\n")
    spec = importlib.util.spec_from_file_location("mine", folder / "mine.py")
    assert spec is not None
    assert spec.loader is not None
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    with pytest.warns(errors.CoupledObjectivesWarning, match=r"gramfx/mine\.py:2 in centred") as caught:
        gramfx.transform(Model(mine.centred), compile=False)(torch.randn(4, 3))
    assert [warning.filename for warning in caught] == [__file__]
