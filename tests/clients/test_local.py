"""Models, losses, rates and the local update."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mimicfl as mf
from mimicfl.clients.local_update import local_update
from mimicfl.clients.losses import as_loss
from mimicfl.clients.lr import schedule
from mimicfl.clients.params import Workspace, flatten, load


@pytest.mark.parametrize(
    ("model", "shape", "parameters"),
    [
        (mf.models.LeNet(), (1, 28, 28), 44_426),
        (mf.models.VGG11(), (3, 32, 32), 9_750_922),
        (mf.models.MLP(64, 32, 10), (1, 8, 8), 64 * 32 + 32 + 320 + 10),
        (mf.models.Logistic(64, 10), (64,), 650),
    ],
)
def test_models_have_the_expected_number_of_parameters(model, shape, parameters):
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


def test_vgg_has_dropout_and_no_batchnorm():
    kinds = {type(layer) for layer in mf.models.VGG11()}
    assert nn.Dropout in kinds
    assert nn.BatchNorm2d not in kinds


def test_initial_vgg_keeps_the_scale_of_the_signal_in_all_layers():
    """With PyTorch's default initialisation it drops to a hundredth, and the loss does not decrease."""
    images = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    x, sizes = images - 0.5, []
    for layer in mf.models.VGG11().eval():
        x = layer(x)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            sizes.append(float(x.detach().std()))
    assert min(sizes) > 0.1
    assert max(sizes) < 10


def test_initial_weights_depend_only_on_the_seed_and_leave_the_global_generator_unchanged():
    data = mf.datasets.load("digits")
    before = torch.random.get_rng_state()
    a, b, c = (flatten(mf.models.build("mlp", data, seed)) for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("spec", "words"),
    [("lenett", "did you mean 'lenet'"), ("lenet", "at least 16x16"), ("vgg11", "32x32"), ("mlp:0", "layer size"), ("mlp:a", "layer size")],
)
def test_models_that_do_not_fit_the_data_raise_usage_error(spec, words):
    with pytest.raises(mf.UsageError, match=words):
        mf.models.build(spec, mf.datasets.load("digits"))


def test_flatten_and_load_are_inverse():
    a, b = mf.models.LeNet(), mf.models.LeNet()
    load(b, flatten(a))
    assert torch.equal(flatten(a), flatten(b))


def test_workspace_parameters_are_views_of_one_vector():
    work = Workspace(mf.models.MLP(3, 4, 2), torch.device("cpu"))
    work.w.zero_()
    assert work.module(torch.ones(1, 3)).abs().sum() == 0
    work.module(torch.ones(1, 3)).sum().backward()
    assert torch.equal(work.grad, torch.cat([p.grad.reshape(-1) for p in work.module.parameters()]))


def test_frozen_parameters_are_unchanged_and_not_sent():
    model = mf.models.MLP(64, 8, 10)
    for p in model[1].parameters():
        p.requires_grad_(False)
    data = mf.datasets.load("digits")
    history = mf.simulate(model, data, mf.partition.iid(data.y_train, 4), rounds=1)
    assert history.params.numel() == 8 * 10 + 10
    assert torch.equal(history.model()[1].weight, model[1].weight)


def test_tied_parameters_are_trained_as_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6)
            self.b.weight = self.a.weight
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.b(self.a(x)))

    x, y = torch.randn(20, 6), torch.arange(20) % 2
    model = Tied()
    trained = mf.simulate(model, mf.Data(x, y, x, y), [range(20)], rounds=1, local=mf.LocalSGD(steps=3, batch_size=None, lr=0.1)).model()
    assert trained.a.weight is trained.b.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(trained.a.weight, model.a.weight)


@pytest.mark.parametrize("model", [mf.models.LeNet(), mf.models.MLP(784, 20, 10)], ids=["lenet", "mlp"])
def test_local_update_equals_torch_sgd(model):
    """torch.optim.SGD with the same batches gives the same weights, and g is the sum of the gradients."""
    model = model.double()
    batches = [(torch.randn(5, 1, 28, 28).double(), torch.randint(0, 10, (5,))) for _ in range(4)]
    work = Workspace(model, torch.device("cpu"))
    result = local_update(work, batches, 0.05, nn.functional.cross_entropy)
    g, total = result.g, result.total
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gradients, losses = torch.zeros_like(g), 0.0
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        gradients += torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        losses += loss.item()
        optimizer.step()
    torch.testing.assert_close(g, gradients)
    torch.testing.assert_close(work.w, flatten(model))
    assert total.item() == pytest.approx(losses)


def test_updates_are_accurate_for_tiny_rates():
    """g is accumulated: float32 agrees with float64, while (w_t - w)/eta has an error of more than 0.1 %."""
    batches = [(torch.randn(8, 20), torch.randint(0, 3, (8,)))] * 2
    results = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = mf.models.MLP(20, 16, 3).to(dtype)
        work = Workspace(model, torch.device("cpu"))
        start = work.w.clone()
        g = local_update(work, [(a.to(dtype), b) for a, b in batches], 1e-6, nn.functional.cross_entropy).g
        results[dtype] = (g.double(), ((start - work.w) / 1e-6).double())
    exact = results[torch.float64][0]
    accumulated, recovered = results[torch.float32]
    assert (accumulated - exact).norm() / exact.norm() < 1e-5
    assert (recovered - exact).norm() / exact.norm() > 1e-3


@pytest.mark.slow
@given(n=st.integers(1, 60), size=st.one_of(st.none(), st.integers(1, 70)), epochs=st.integers(1, 4), steps=st.integers(1, 30))
def test_batches_cover_every_sample_once_per_pass(n, size, epochs, steps):
    by_epochs = mf.LocalSGD(epochs=epochs, batch_size=size)
    sizes = by_epochs.batch_sizes(n)
    order = by_epochs.order(n, sizes, np.random.default_rng(0))
    assert sum(sizes) == epochs * n
    assert np.bincount(order, minlength=n).tolist() == [epochs] * n
    by_steps = mf.LocalSGD(steps=steps, batch_size=size)
    sizes = by_steps.batch_sizes(n)
    assert len(sizes) == steps
    assert max(sizes) <= min(size or n, n)
    assert np.ptp(np.bincount(by_steps.order(n, sizes, np.random.default_rng(0)), minlength=n)) <= 1


def test_rates():
    assert schedule(0.1)(5, 3) == 0.1
    assert schedule("0.1")(5, 3) == 0.1
    assert schedule("geometric:0.1,0.5,floor=0.02")(9, 1) == 0.02
    assert schedule("theory:c=1,beta=2")(2, 8) == 2.0
    assert schedule(lambda t: 1 / (t + 1))(3, 7) == 0.25
    assert schedule(lambda t, active: active)(3, 7) == 7


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (0, "more than 0"),
        (-1.0, "more than 0"),
        ("geometric:0.1,2", "decay"),
        ("geometrical:1,1", "did you mean"),
        ("geometric", "needs 'rate'"),
        ([1], "a learning rate must be"),
    ],
)
def test_invalid_rates_raise_usage_error(rate, words):
    with pytest.raises(mf.UsageError, match=words):
        mf.LocalSGD(lr=rate)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"epochs": 1, "steps": 1}, "not both"), ({"epochs": 0}, "epochs"), ({"batch_size": 0}, "batch_size"), ({"steps": 1.5}, "steps")],
)
def test_invalid_local_sgd_raises_usage_error(options, words):
    with pytest.raises(mf.UsageError, match=words):
        mf.LocalSGD(**options)


def test_losses():
    out = torch.tensor([[2.0], [-1.0]])
    assert as_loss("binary")(out, torch.tensor([1, 0])).item() == pytest.approx((np.log1p(np.exp(-2)) + np.log1p(np.exp(-1))) / 2)
    assert as_loss("mse")(out, torch.tensor([1.0, 1.0])).item() == pytest.approx((1 + 4) / 4)
    with pytest.raises(mf.UsageError, match="did you mean 'mse'"):
        as_loss("mze")
