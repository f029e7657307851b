"""Exact constants equal those computed by brute force, and estimates are close to them."""

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.clients.losses import LOSSES
from mimicfl.data.clients import Clients
from mimicfl.theory.constants import Constants, LinearModel, constants, heterogeneity, power_iteration, sampled_variance
from mimicfl.theory.population import Population

pytestmark = pytest.mark.slow


def population(data, split, model, kind):
    model = model.double()
    return Population(model, Clients(data, split, torch.device("cpu"), torch.float64), LOSSES.find(kind))


def problems():
    for kind, loss in (("quadratic", "mse"), ("logistic", "binary")):
        data = mf.datasets.load(f"synthetic:{kind}", num_clients=4, dim=5, samples=9, seed=3)
        for model in (mf.models.Logistic(5, 1, bias=False), mf.models.Logistic(5, 1)):
            yield population(data, mf.partition.by_ids(data.ids), model, loss), loss
    data = mf.datasets.load("digits")
    split = [part[: 20 + i % 2] for i, part in enumerate(mf.partition.shards(data.y_train, 6, 2, seed=0))]
    yield population(data, split, mf.models.build("logistic", data), "cross-entropy"), "cross-entropy"


def hessian(p, w, i):
    return torch.autograd.functional.hessian(lambda v: p._value(v, {}, *next(p._slices(p.clients.split[i]))[1:]), w)


@pytest.fixture(scope="module", params=range(5))
def case(request):
    return list(problems())[request.param]


def test_gradients_equal_autograd_with_and_without_stacking(case):
    p, _ = case
    d = sum(shape.numel() for shape in p.shapes)
    w = torch.linspace(-1, 1, d, dtype=torch.float64)
    values, g = p.gradients(w)
    p.stacked = not p.stacked
    other_values, other = p.gradients(w)
    p.stacked = not p.stacked
    assert torch.allclose(g, other, atol=1e-13)
    assert torch.allclose(values, other_values)
    for i, rows in enumerate(p.clients.split):
        leaf = w.clone().requires_grad_()
        value = p._value(leaf, {}, *p._samples(torch.from_numpy(rows)))
        value.backward()
        assert values[i] == pytest.approx(float(value.detach()))
        assert torch.allclose(g[i], leaf.grad, atol=1e-13)
    kappa2 = heterogeneity(p, g)
    assert kappa2[0] == pytest.approx(float((g[0] - g.mean(dim=0)).square().sum()))


def test_smoothness_equals_the_largest_curvature(case):
    p, kind = case
    d = sum(shape.numel() for shape in p.shapes)
    linear = LinearModel.of(p, kind)
    L = linear.smoothness()
    for i in range(2):
        at_zero = float(torch.linalg.matrix_norm(hessian(p, torch.zeros(d, dtype=torch.float64), i), 2))
        elsewhere = float(torch.linalg.matrix_norm(hessian(p, torch.ones(d, dtype=torch.float64), i), 2))
        assert max(at_zero, elsewhere) <= L[i] * (1 + 1e-9)
        if kind == "cross-entropy":
            assert linear.how == "upper bound"
            assert L[i] <= 6 * at_zero  # the curvature of softmax over ten classes is 1/10 at zero
        else:
            assert linear.how == "exact"
            assert at_zero == pytest.approx(L[i])
        w = torch.ones(d, dtype=torch.float64)
        assert power_iteration(p, w, 200)[i] == pytest.approx(elsewhere, rel=1e-2)


def test_variance_equals_the_variance_over_all_batches(case):
    """The variance equals the mean squared deviation over all batches of two samples."""
    p, kind = case
    d = sum(shape.numel() for shape in p.shapes)
    w = torch.linspace(-0.5, 1, d, dtype=torch.float64)
    g = p.gradients(w)[1]
    rows = p.clients.split[0]
    exact = LinearModel.of(p, kind).variance(w, g, [2] * len(p.clients))
    pairs = [(a, b) for k, a in enumerate(rows) for b in rows[k + 1 :]]
    all_pairs = np.mean([float((p.gradient(w, np.array(pair))[1] - g[0]).square().sum()) for pair in pairs])
    assert exact[0] == pytest.approx(all_pairs)
    assert LinearModel.of(p, kind).variance(w, g, p.clients.sizes)[0] == 0
    assert sampled_variance(p, w, g, [2] * len(p.clients), draws=300)[0] == pytest.approx(all_pairs, rel=0.3)


def test_constants_of_a_network_are_marked_as_estimates(digits):
    p = population(digits["data"], digits["split"][:4], mf.models.MLP(64, 5, 10), "cross-entropy")
    w = torch.cat([q.detach().reshape(-1) for q in p.module.parameters()])
    found = constants(p, [w, 0.5 * w], [16] * 4, "cross-entropy", iterations=15)
    assert "estimate" in found.how
    assert "estimate" in found.sigma_how
    true = max(float(torch.linalg.matrix_norm(hessian(p, w, i), 2)) for i in range(4))
    assert pytest.approx(true, rel=0.1) == found.L
    assert LinearModel.of(p, "cross-entropy") is None
    text = " ".join(found.sentences())
    assert "power iteration at 2 points" in text


def test_only_linear_models_with_built_in_losses_are_exact(quadratic):
    def linear(model, kind):
        return LinearModel.of(population(quadratic["data"], quadratic["split"], model, "mse"), kind)

    assert linear(mf.models.Logistic(5, 1), "mse") is not None
    assert linear(mf.models.Logistic(5, 1), "huber") is None
    assert linear(nn.Sequential(nn.Linear(5, 1), nn.Tanh()), "mse") is None
    frozen = mf.models.Logistic(5, 1)
    frozen[1].bias.requires_grad_(False)
    assert linear(frozen, "mse") is None


@pytest.mark.parametrize("given", [(-1.0, 0.0), (float("nan"), 0.0), (1.0, -2.0), (1.0, float("inf"))])
def test_invalid_constants_raise_usage_error(given):
    with pytest.raises(mf.UsageError, match="must be"):
        Constants(*given, np.zeros(2), "exact")
