"""Compiled cross-entropy equals PyTorch's, alone and together with the product that made its outputs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mimicfl.engines.native.layers import LayerOverrides, linear, loss

from .compare import assert_close, compiled, penalty, seen

CLASSES = [64, 65, 79, 100, 128, 1031]  # whole vectors, four at a time and single ones, with and without a rest


def outputs_and_targets(classes, samples=9, seed=0):
    rng = torch.Generator().manual_seed(seed)
    z, y = 3 * torch.randn(samples, classes, generator=rng), torch.randint(0, classes, (samples,), generator=rng)
    y[:2] = torch.tensor([0, classes - 1])
    return z, y


@pytest.fixture(params=[False, True], ids=["PyTorch's products", "oneDNN's products"])
def _products(request, monkeypatch):
    """Products by either library, whatever the processor."""
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("PyTorch was built without oneDNN")
    monkeypatch.setattr(linear, "faster", lambda: request.param)


@pytest.mark.slow
@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_its_derivatives_equal_pytorch(classes, reduction):
    z, y = outputs_and_targets(classes)

    def call(z):
        return F.cross_entropy(z, y, reduction=reduction)

    layers = compiled(lambda: call(z))
    for given in (z, z.repeat(1, 2)[:, :classes], 1e4 * z, z - 1e6):
        leaf, found = given.detach().requires_grad_(), []
        for active in (None, layers):
            with LayerOverrides(active):
                values = call(leaf)
            weights = torch.linspace(0.5, 1.5, values.numel()).view_as(values)  # each loss has its own gradient
            found.append([values.detach(), *torch.autograd.grad((values * weights).sum(), leaf)])
        assert_close(found, 2e-6)
    leaves = [z.requires_grad_()]
    true = penalty(call, leaves)
    with LayerOverrides(layers):
        ours = penalty(call, leaves)
    assert_close((true, ours))


@pytest.mark.slow
def test_numbers_that_are_not_finite():
    z, y = outputs_and_targets(70, samples=5)
    z[0, 3] = float("nan")
    z[1, 4], z[2] = float("inf"), -float("inf")
    z[3, 7] = -float("inf")
    y[3], y[4] = 7, 8  # a loss of infinity
    layers, found = compiled(lambda: F.cross_entropy(z, y)), []
    for active in (None, layers):
        leaf = z.clone().requires_grad_()
        with LayerOverrides(active):
            values = F.cross_entropy(leaf, y, reduction="none")
        values.sum().backward()
        found.append((values.detach(), leaf.grad))
    for true, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-6, atol=1e-6, equal_nan=True)


class Head(nn.Module):
    """A model whose last layer makes many outputs."""

    def __init__(self, make):
        super().__init__()
        self.make, self.body = make, nn.Linear(12, 20)
        self.w, self.bias = nn.Parameter(torch.randn(1100, 20)), nn.Parameter(torch.randn(1100))

    def forward(self, x):
        return self.make(torch.tanh(self.body(x)), self.w, self.bias)


HEADS = {
    "linear": lambda h, w, b: F.linear(h, w, b),
    "without a bias": lambda h, w, b: F.linear(h, w),
    "product": lambda h, w, b: h @ w.t(),
    "matmul": lambda h, w, b: torch.matmul(h, w.mT),
    "positions": lambda h, w, b: F.linear(h.view(-1, 3, 20), w, b).flatten(0, 1),
    "reshaped": lambda h, w, b: F.linear(h.view(3, -1, 20), w, b).reshape(-1, 1100).contiguous(),
    # None of the following may use the remembered product.
    "changed in place": lambda h, w, b: F.linear(h, w, b).mul_(2),
    "scaled": lambda h, w, b: 2 * F.linear(h, w, b),
    "other rows": lambda h, w, b: F.linear(h, w, b).flip(0),
    "other classes": lambda h, w, b: F.linear(h, w, b).view(-1, 1100)[:, :1050],
    "turned": lambda h, w, b: F.linear(h, w, b).reshape(1100, -1).t()[:, :1100],
    "detached": lambda h, w, b: F.linear(h, w, b).detach() + b,
    "biases of samples": lambda h, w, b: F.linear(h, w, b * torch.linspace(0.1, 10, len(h))[:, None]),
    "used twice": lambda h, w, b: (lambda z: z + z.square())(F.linear(h, w, b)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("_products")
@pytest.mark.parametrize("make", HEADS.values(), ids=list(HEADS))
def test_loss_of_a_product_equals_pytorch(make, monkeypatch):
    monkeypatch.setattr(loss, "AT_ONCE", 64 * 9 * 2)  # several blocks of classes and a rest
    torch.manual_seed(0)
    net, x = Head(make), torch.randn(9, 12)
    y = torch.randint(0, 1050, (9,))

    def call(x, *_):
        return F.cross_entropy(net(x), y)

    leaves = [x.requires_grad_(), *net.parameters()]
    layers = compiled(lambda: call(x))

    def derivatives():
        value = call(*leaves)
        first = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True, materialize_grads=True)
        plain = torch.autograd.grad(call(*leaves), leaves, allow_unused=True, materialize_grads=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves, allow_unused=True, materialize_grads=True)
        return [value.detach(), *plain, *(g.detach() for g in first), *second]

    true = derivatives()
    with LayerOverrides(layers):
        ours = derivatives()
    assert_close((true, ours))
    assert layers.memory.product is None  # its matrix is not kept longer than needed


def both_ways(call, *leaves):
    """Return what a call returns and the gradients, with PyTorch and with compiled layers."""
    layers, found = compiled(lambda: call(*leaves)), []
    for active in (None, layers):
        for leaf in leaves:
            leaf.grad = None
        with LayerOverrides(active):
            values = call(*leaves)
        values[0].backward()
        found.append([value.detach() for value in values] + [leaf.grad.clone() for leaf in leaves])
    return found


@pytest.fixture
def head():
    torch.manual_seed(0)
    return torch.randn(6, 20).requires_grad_(), torch.randn(1100, 20).requires_grad_(), torch.randint(0, 1100, (6,))


@pytest.mark.slow
def test_outputs_that_are_used_elsewhere_get_all_their_gradients(head):
    x, w, y = head

    def call(x, w):
        z = F.linear(x, w)
        return F.cross_entropy(z, y) + 0.01 * z.square().sum(), z

    assert_close(both_ways(call, x, w))


@pytest.mark.slow
def test_hooks_and_retained_gradients_of_the_outputs_see_them(head):
    x, w, y = head

    def retained(x, w):
        z = F.linear(x, w)
        z.retain_grad()
        value = F.cross_entropy(z, y)
        value.backward(retain_graph=True)
        return value, z.grad

    assert_close(both_ways(retained, x, w))

    def hooked(x, w):
        z = F.linear(x, w)
        z.register_hook(lambda g: 3 * g)
        return (F.cross_entropy(z, y),)

    assert_close(both_ways(hooked, x, w))

    def hooked_view(x, w):
        z = F.linear(x.view(2, 3, 20), w)
        z.register_hook(lambda g: 3 * g)
        return (F.cross_entropy(z.flatten(0, 1), y),)

    assert_close(both_ways(hooked_view, x, w))


@pytest.mark.slow
def test_weights_changed_between_the_product_and_the_loss(head):
    x, w, y = head

    def call(x, w):
        inner = w * 1
        z = F.linear(x, inner)
        with torch.no_grad():
            other = inner.clone()
            other.mul_(2)
        return (F.cross_entropy(z, y) + 0 * other.sum(),)

    assert_close(both_ways(call, x, w))

    def changed(x, w):
        z = F.linear(x, w)
        value = F.cross_entropy(z, y)
        with torch.no_grad():
            w.mul_(1.0)  # in place: PyTorch refuses a backward pass that needs the old values
        return (value,)

    layers = compiled(lambda: F.cross_entropy(F.linear(x, w), y))
    for active in (None, layers):
        with LayerOverrides(active):
            [value] = changed(x, w)
        with pytest.raises(RuntimeError, match="inplace"):
            value.backward()


@pytest.mark.slow
def test_a_view_without_a_gradient_gives_none(head):
    """A loss of the outputs as they are, as a weight or a target of another loss."""
    x, w, y = head

    def call(x, w):
        z = F.linear(x, w)
        with torch.no_grad():
            rows = z.view(-1, 1100)
        return F.cross_entropy(rows, y) * z.square().mean(), z

    assert_close(both_ways(call, x, w))


@pytest.mark.parametrize(
    "call",
    [
        lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
        lambda z, y: F.cross_entropy(z, y, weight=torch.rand(80)),
        lambda z, y: F.cross_entropy(z, z.softmax(1)),
        lambda z, y: F.cross_entropy(z[:, :60], y.clamp(max=59)),  # few classes
        lambda z, y: F.cross_entropy(z.double(), y),
        lambda z, y: F.cross_entropy(z.view(3, 2, 80).mT, y.view(3, 2)),
        lambda z, y: F.cross_entropy(z[0], y[0]),
        lambda z, y: F.cross_entropy(z, y.where(y == y[0], -100)),
        lambda z, y: F.cross_entropy(z, y, ignore_index=int(y[1])),
        lambda z, y: F.cross_entropy(z[:0], y[:0]),
        lambda z, y: F.cross_entropy(z, y.byte()),
        lambda z, y: torch.autocast("cpu", torch.bfloat16)(F.cross_entropy)(z, y),
    ],
)
def test_other_losses_use_pytorch(call):
    z, y = outputs_and_targets(80, samples=6)
    assert seen(lambda: call(z, y)) == []


@pytest.mark.parametrize("y", [torch.tensor([0, 80]), torch.tensor([-1, 3]), torch.zeros(3, dtype=torch.long)], ids=["high", "low", "many"])
def test_wrong_targets_raise_the_error_of_pytorch(y):
    z = torch.randn(2, 80)
    with pytest.raises((IndexError, ValueError)) as true:
        F.cross_entropy(z, y)
    with LayerOverrides(None) as recorded, pytest.raises(type(true.value)) as ours:
        F.cross_entropy(z, y)
    assert str(ours.value) == str(true.value)
    assert recorded.shapes == []


def test_wrong_products_raise_the_error_of_pytorch():
    """Also calls whose arguments have other names, such as `out`."""
    layers = compiled(lambda: F.cross_entropy(torch.randn(2, 80), torch.tensor([0, 1])))
    x, w = torch.randn(4, 5), torch.randn(1100, 5)
    with LayerOverrides(layers):
        for wrong in (lambda: F.linear(x, w.t()), lambda: torch.mm(x, w), lambda: torch.matmul(x)):
            with pytest.raises((RuntimeError, TypeError)):
                wrong()
        out = torch.empty(4, 1100)
        assert torch.matmul(x, w.t(), out=out) is out
        assert torch.equal(out, torch.mm(x, w.t()))
