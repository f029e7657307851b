"""Linear layers through oneDNN equal PyTorch's, whatever the processor."""

import pytest
import torch
from torch.nn import functional as F

from mimicfl.engines.native.layers import LayerOverrides, Layers, linear
from tests.engines.native.problems import needs_compiler

from .compare import assert_close, grads, penalty, seen

LAYERS = Layers([])


@pytest.fixture(autouse=True)
def _products(monkeypatch):
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("PyTorch was built without oneDNN")
    monkeypatch.setattr(linear, "faster", lambda: True)
    monkeypatch.setattr(linear, "FEWEST_WEIGHTS", 1)
    monkeypatch.setattr(linear, "FEWEST_PRODUCTS", 1)


CALLS = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "keywords": lambda x, w, b: F.linear(bias=b, weight=w, input=x),
    "no bias": lambda x, w, b: F.linear(x, w) + b,
    "matmul": lambda x, w, b: torch.matmul(x, w.t()),
    "operator": lambda x, w, b: x @ w.t(),
    "rows": lambda x, w, b: torch.mm(x.flatten(0, -2), w.t()),
}


@needs_compiler
@pytest.mark.parametrize("inputs", [16, 17, 40, 96, 100, 128, 300])
@pytest.mark.parametrize("outputs", [24, 31, 96, 128, 130])
def test_compiled_gradients_equal_float64_and_write_nothing_else(inputs, outputs, monkeypatch):
    """Every width of a tile occurs, with tiles that overlap and tiles that do not."""
    monkeypatch.setattr(linear, "NARROW", 1000)
    monkeypatch.setattr(linear, "_weight_gradient", None)  # the other way is not used
    rng = torch.Generator().manual_seed(inputs + outputs)
    for rows in (1, 2, 33):
        dy, x = (torch.randn(rows, size, generator=rng) for size in (outputs, inputs))
        memory = torch.full((outputs + 2, inputs), 7.0)
        dw, db = linear.parameter_gradients(dy, x, True, True, memory[1:-1])
        assert dw.data_ptr() == memory[1].data_ptr()
        torch.testing.assert_close(dw.double(), dy.double().t() @ x.double(), rtol=0, atol=1e-5)
        torch.testing.assert_close(db.double(), dy.double().sum(0), rtol=0, atol=1e-5)
        assert torch.equal(memory[[0, -1]], torch.full((2, inputs), 7.0))
        assert torch.equal(linear.parameter_gradients(dy, x.mT.contiguous().mT, True, False)[0], dw)


def test_without_a_compiler_the_library_computes_the_gradients(monkeypatch):
    monkeypatch.setattr(linear, "compiled_gradients", lambda: None)
    dy, x = torch.randn(9, 30), torch.randn(9, 20)
    dw, db = linear.parameter_gradients(dy, x, True, True)
    assert_close(([dy.t() @ x, dy.sum(0)], [dw, db]))


def biased(call):
    """Add the bias once more, so that every call has a gradient for it."""
    return lambda x, w, b: call(x, w, b) + b


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("sizes", [((7,), 13, 5), ((3, 4), 6, 17), ((2, 3, 2), 40, 33), ((5, 30), 104, 130), ((1,), 1, 1)])
@pytest.mark.parametrize("frozen", [(), (0,), (1, 2)], ids=["none", "input", "weights"])
def test_calls_and_their_derivatives_equal_pytorch(call, sizes, frozen):
    rows, features, outputs = sizes
    rng = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=rng) for shape in ((*rows, features), (outputs, features), (outputs,))]
    assert seen(lambda: call(*given)) == [None]
    for layout in (torch.clone, lambda x: torch.stack((x, x), -1)[..., 0], lambda x: x.mT.contiguous().mT if x.ndim > 1 else x.clone()):
        leaves = [each.clone().requires_grad_(k not in frozen) for k, each in enumerate(given)]
        leaves[0] = layout(given[0]).requires_grad_(0 not in frozen)
        true = grads(biased(call), leaves)
        with LayerOverrides(LAYERS):
            assert_close((true, grads(biased(call), leaves)))


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_second_derivatives_equal_pytorch(call):
    leaves = [torch.randn(shape).requires_grad_() for shape in ((2, 3, 5), (4, 5), (4,))]
    true = penalty(biased(call), leaves)
    with LayerOverrides(LAYERS):
        assert_close((true, penalty(biased(call), leaves)), 1e-3)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: F.linear(x.double(), w.double()),
        lambda x, w: F.linear(x[0], w[0]),  # a vector of weights
        lambda x, w: torch.matmul(x, torch.randn(4, 5)),  # not a transposed matrix in memory: a copy would cost more
        lambda x, w: torch.matmul(x[0], torch.randn(4)),
        lambda x, w: torch.matmul(torch.randn(2, 3, 4, 6), torch.randn(2, 3, 6, 5)),
        lambda x, w: torch.autocast("cpu", torch.bfloat16)(F.linear)(x, w),
        lambda x, w: F.linear(x, w.t().contiguous().t()),
    ],
)
def test_other_products_use_pytorch(call):
    assert seen(lambda: call(torch.randn(3, 4), torch.randn(5, 4))) == []


@pytest.mark.parametrize("rows", [(3,), (2, 3)])
def test_results_can_be_changed_in_place(rows):
    x, w = torch.randn(*rows, 4).requires_grad_(), torch.randn(5, 4).requires_grad_()
    true = grads(lambda x, w: F.linear(x, w).relu_(), [x, w])
    with LayerOverrides(LAYERS):
        assert_close((true, grads(lambda x, w: F.linear(x, w).relu_(), [x, w])))


def test_an_empty_batch():
    x, w = torch.randn(0, 4).requires_grad_(), torch.randn(5, 4).requires_grad_()
    with LayerOverrides(LAYERS):
        F.linear(x, w).sum().backward()
    assert x.grad.shape == x.shape
    assert not w.grad.any()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: F.linear(x, w),
        lambda x, w: F.linear(x, w.t(), torch.randn(3)),
        lambda x, w: x @ w.t() @ w.t(),
        lambda x, w: F.linear(x),
    ],
)
def test_invalid_calls_raise_the_error_of_pytorch(call):
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    with pytest.raises((RuntimeError, TypeError)) as true:
        call(x, w)
    with LayerOverrides(LAYERS), pytest.raises(type(true.value)) as ours:
        call(x, w)
    assert str(ours.value) == str(true.value)


def test_few_products_use_pytorch(monkeypatch):
    """The number of rows decides, which may differ from batch to batch."""
    monkeypatch.setattr(linear, "FEWEST_PRODUCTS", 4 * 5 * 3)
    w, used = torch.randn(5, 4).requires_grad_(), []
    with LayerOverrides(LAYERS):
        for rows in (2, 3):
            used.append(type(F.linear(torch.randn(rows, 4), w).grad_fn).__name__)
    assert used[0] != used[1] == "LinearBackward"
