"""The weights of the shortest average of gradients."""

import pytest
import torch
from torch import Tensor

from gramfx.cli.min_norm import balanced_weights, min_norm_weights


def gramian_of(*rows: list[float]) -> Tensor:
    """``J Jᵀ`` of the rows of J."""
    jacobian = torch.tensor(rows, dtype=torch.float64)
    return jacobian @ jacobian.T


@pytest.mark.parametrize(
    ("gramian", "wanted"),
    [
        pytest.param(gramian_of([3.0]), [1.0], id="one objective"),
        pytest.param(gramian_of([1.0, 0.0], [0.0, 1.0]), [0.5, 0.5], id="orthogonal, of one length"),
        pytest.param(gramian_of([2.0, 0.0], [0.0, 1.0]), [0.2, 0.8], id="orthogonal, of two lengths"),
        pytest.param(gramian_of([1.0, 0.0], [-2.0, 0.0]), [2 / 3, 1 / 3], id="opposite: the zero vector"),
        pytest.param(gramian_of([1.0, 0.0], [3.0, 1.0]), [1.0, 0.0], id="one is the shortest"),
        pytest.param(gramian_of([0.0], [0.0]), [0.5, 0.5], id="all zero: no change"),
    ],
)
def test_known_answers(gramian: Tensor, wanted: list[float]) -> None:
    """Points that geometry gives."""
    got = min_norm_weights(gramian, tolerance=1e-9)
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", [(2, 5), (10, 50), (32, 8)], ids=str)
def test_weights_are_optimal(seed: int, shape: tuple[int, int]) -> None:
    """On the simplex, and no entry of ``Gw`` is below the squared norm (the optimality condition)."""
    jacobian = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.3
    gramian = jacobian @ jacobian.T
    weights = min_norm_weights(gramian, steps=5000, tolerance=1e-6)
    assert weights.min() >= 0
    assert weights.sum().item() == pytest.approx(1)
    slopes = gramian @ weights
    squared = weights @ slopes
    assert squared <= gramian.mean() + 1e-12
    assert slopes.min() >= squared - 1e-6 * gramian.diagonal().max()


def test_accepts_what_a_step_returns() -> None:
    """A float32 Gramian is left as it is."""
    gramian = torch.eye(3)
    assert min_norm_weights(gramian).tolist() == pytest.approx([1 / 3] * 3)
    assert torch.equal(gramian, torch.eye(3))


def test_bounded_by_steps() -> None:
    """No step leaves the plain average."""
    assert min_norm_weights(gramian_of([2.0, 0.0], [0.0, 1.0]), steps=0).tolist() == [0.5, 0.5]


def test_balanced_weights_are_the_average_without_conflict() -> None:
    """Orthogonal gradients of any length get equal weights, a zero one does no harm."""
    gramian = torch.diag(torch.tensor([1.0, 4.0, 0.25]))
    torch.testing.assert_close(balanced_weights(gramian, tolerance=1e-9), torch.full((3,), 1 / 3).double())
    assert balanced_weights(torch.zeros(2, 2)).isfinite().all()


@pytest.mark.parametrize("seed", range(5))
def test_balanced_weights_make_every_objective_fall(seed: int) -> None:
    """By at least ``‖d‖² ‖g_i‖²``, up to the tolerance."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.logspace(0, 1.5, 12, dtype=torch.float64)[:, None]
    jacobian = lengths * (torch.randn(12, 20, dtype=torch.float64, generator=generator) + 0.2)
    gramian = jacobian @ jacobian.T
    weights = balanced_weights(gramian, steps=5000, tolerance=1e-3)
    assert weights.min() >= 0
    assert weights.sum().item() == pytest.approx(1)
    falls = gramian @ weights / gramian.diagonal()
    assert falls.min() > 0
    support = weights > 1e-6
    torch.testing.assert_close(falls[support], falls[support].mean().expand(int(support.sum())), rtol=0.05, atol=0)
