"""The oracle against Jacobians worked out by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import reference


@pytest.fixture(autouse=True)
def double_by_default() -> Any:
    """Hand-made examples are in float64."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_linear_layer_by_formula() -> None:
    """d y[b, o] / d W[p, i] = δ(o, p) x[b, i], and d y[b, o] / d b[p] = δ(o, p)."""
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    want_weight = torch.einsum("op,bi->bopi", torch.eye(2), x).reshape(8, 6)
    want_bias = torch.eye(2).repeat(4, 1)
    got = reference.jacobian(layer(x), reference.trainable(layer))
    torch.testing.assert_close(got, torch.cat([want_weight, want_bias], 1))
    want = torch.kron(x @ x.T + 1, torch.eye(2))
    torch.testing.assert_close(reference.gramian(layer(x), reference.trainable(layer)), want)


def test_convolution_by_patches() -> None:
    """A convolution is a linear layer on patches."""
    layer, x = nn.Conv2d(2, 3, 2, bias=False), torch.randn(4, 2, 3, 3)
    patches = F.unfold(x, 2).sum(2)
    want = torch.einsum("op,bi->bopi", torch.eye(3), patches).reshape(12, 24)
    torch.testing.assert_close(reference.jacobian(layer(x).sum((2, 3)), [layer.weight]), want)


@pytest.mark.parametrize("sparse", [False, True])
def test_embedding_is_one_hot(sparse: bool) -> None:
    """Row b of J is one at the id of sample b, sparse gradients included."""
    table, ids = nn.Embedding(5, 1, sparse=sparse), torch.tensor([3, 0, 3])
    want = F.one_hot(ids, 5).to(torch.float64)
    torch.testing.assert_close(reference.jacobian(table(ids), [table.weight]), want)


def test_batch_norm_mean_couples_rows() -> None:
    """Centring over B samples takes the mean row off every row."""
    layer, x = nn.Linear(3, 1, bias=False), torch.randn(4, 3)
    y = layer(x)
    torch.testing.assert_close(reference.jacobian(y - y.mean(0), [layer.weight]), x - x.mean(0))


def test_shared_unused_and_frozen_parameters() -> None:
    """A shared parameter counts once, an unused one has zero columns, a frozen one none."""
    net = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    net["b"].weight = net["a"].weight
    net["c"].weight.requires_grad_(False)
    named = reference.named_trainable(net)
    assert list(named) == ["a.weight", "b.bias", "c.bias"]
    x = torch.randn(3, 2)
    rows = reference.jacobian(net["a"](x) + net["b"](x), list(named.values()))
    assert rows.shape == (6, 8)
    torch.testing.assert_close(rows[:, :4], 2 * torch.einsum("op,bi->bopi", torch.eye(2), x).reshape(6, 4))
    assert not rows[:, reference.columns_under(named, "c")].any()
    assert rows[:, reference.columns_under(named, "b")].any()


def test_parameters_of_several_modules() -> None:
    """A callable over modules names all of them; what they share counts once."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    assert list(reference.named_trainable(first, second)) == ["0.weight", "0.bias", "1.bias"]


def test_complex_parameters_have_two_columns_an_entry() -> None:
    """d Re(z w) / d (Re w, Im w) = (Re z, -Im z)."""
    w, z = torch.randn(2, dtype=torch.complex128, requires_grad=True), torch.randn(3, 2, dtype=torch.complex128)
    want = torch.stack([z.real, -z.imag], 2).reshape(3, 4)
    torch.testing.assert_close(reference.jacobian((z * w).sum(1).real, [w]), want)


def test_objectives_without_a_graph_and_without_entries() -> None:
    """Constants have zero rows; no objectives give no rows."""
    layer = nn.Linear(2, 1)
    assert not reference.jacobian(torch.ones(2), reference.trainable(layer)).any()
    assert reference.gramian(layer(torch.randn(0, 2)), reference.trainable(layer)).shape == (0, 0)


def test_weighted_gradient_is_a_product_with_the_jacobian() -> None:
    """Jᵀ w, also where a parameter is not used."""
    net, x, w = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3), torch.randn(10)
    chosen = [*reference.trainable(net), nn.Parameter(torch.randn(2))]
    rows = reference.jacobian(net(x), chosen)
    torch.testing.assert_close(reference.weighted_gradient(net(x), chosen, w), rows.T @ w)


def test_separate_uses_leave_out_cross_terms() -> None:
    """x W + x² W: each use alone gives its own Gramian; the true one has the cross terms as well."""
    weight, x = torch.randn(3, 2), torch.randn(4, 3)
    eye = torch.eye(2)
    first, second = torch.kron(x @ x.T, eye), torch.kron(x.square() @ x.square().T, eye)

    def run(clones: list[Tensor]) -> Tensor:
        return x @ clones[0] + x.square() @ clones[1]

    torch.testing.assert_close(reference.separate_gramian(run, [weight, weight]), first + second)
    leaf = weight.clone().requires_grad_()
    cross = torch.kron(x @ x.square().T + x.square() @ x.T, eye)
    torch.testing.assert_close(reference.gramian(run([leaf, leaf]), [leaf]), first + second + cross)


def test_relative_error() -> None:
    """Relative to the largest entry; safe for zero and empty tensors; shapes must agree."""
    assert reference.relative_error(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 5.0])) == pytest.approx(0.1)
    assert reference.relative_error(torch.tensor([0.25]), torch.zeros(1)) == 0.25
    assert reference.relative_error(torch.zeros(0, 0), torch.zeros(0, 0)) == 0.0
    assert torch.tensor(reference.relative_error(torch.tensor([torch.nan]), torch.ones(1))).isnan()
    with pytest.raises(ValueError, match="shapes differ"):
        reference.relative_error(torch.zeros(2), torch.zeros(2, 1))


def _scale(net: nn.Sequential) -> None:
    net.get_parameter("0.weight").data.mul_(2)


def _buffer(net: nn.Sequential) -> None:
    net.get_buffer("1.num_batches_tracked").add_(1)


def _gradient(net: nn.Sequential) -> None:
    weight = net.get_parameter("0.weight")
    weight.grad = torch.zeros_like(weight)


def _mode(net: nn.Sequential) -> None:
    net[1].eval()


def _freeze(net: nn.Sequential) -> None:
    net.get_parameter("0.bias").requires_grad_(False)


def _replace(net: nn.Sequential) -> None:
    net[0].bias = nn.Parameter(net.get_parameter("0.bias").detach().clone())


def _hook(net: nn.Sequential) -> None:
    net[0].register_forward_hook(lambda *_: None)


def _draw(net: nn.Sequential) -> None:
    torch.rand(1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_scale, "tensors: 0.weight"),
        (_buffer, "tensors: 1.num_batches_tracked"),
        (_gradient, "gradients: 0.weight"),
        (_mode, "flags"),
        (_freeze, "flags"),
        (_replace, "identities"),
        (_hook, "hooks"),
        (_draw, "random state"),
    ],
)
def test_snapshot_notices(change: Any, named: str) -> None:
    """Every kind of change is named, and no other."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = reference.snapshot(net)
    assert reference.same(before, reference.snapshot(net))
    change(net)
    assert reference.differences(before, reference.snapshot(net)) == [named]
