"""Calls are replaced only where the replacement does what PyTorch does: layouts, transforms of torch.func, checkpoints."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mimicfl.engines.native.layers import LayerOverrides, Layers, linear

from .compare import assert_close, compiled, grads


@pytest.fixture
def leaves():
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=rng).requires_grad_() for shape in ((3, 2, 8, 8), (4, 2, 3, 3), (5, 36))]


def network(x, w, v):
    return F.linear(F.max_pool2d(F.conv2d(x, w), 2).flatten(1), v)


def transformed(x, w, v):
    return torch.func.vmap(lambda one: network(one[None], w, v)[0])(x)


def differentiated(x, w, v):
    return torch.func.grad(lambda x: network(x, w, v).square().sum())(x)


def forward_derivative(x, w, v):
    return torch.func.jvp(lambda x: network(x, w, v), (x,), (torch.ones_like(x),))[1]


def dual(x, w, v):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(network(forward_ad.make_dual(x, torch.ones_like(x)), w, v)).tangent


def repeated(x, w, v):
    return checkpoint(network, x, w, v, use_reentrant=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # by PyTorch's forward-mode derivatives
@pytest.mark.parametrize("call", [transformed, differentiated, forward_derivative, dual, repeated])
def test_transforms_and_checkpoints_equal_pytorch(call, leaves, monkeypatch):
    monkeypatch.setattr(linear, "faster", lambda: hasattr(torch.ops.mkldnn, "_linear_pointwise"))
    monkeypatch.setattr(linear, "FEWEST_WEIGHTS", 1)
    monkeypatch.setattr(linear, "FEWEST_PRODUCTS", 1)
    layers = compiled(lambda: network(*leaves))
    layers.known |= compiled(lambda: network(leaves[0][:1], *leaves[1:])).known
    true = grads(call, leaves)

    def ours(*leaves):  # as in training, the backward pass is outside
        with LayerOverrides(layers):
            return call(*leaves)

    assert_close((true, grads(ours, leaves)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_wide_convolutions_keep_the_layout_of_images(layout):
    """A model may view its images as rows, which fails in the other layout."""
    x, w = torch.randn(2, 16, 6, 5).contiguous(memory_format=layout).requires_grad_(), torch.randn(32, 16, 3, 3)
    with LayerOverrides(Layers([("ChannelsLast", (16, 6, 5, 32, 3, 3, 1, 1, 1, 1))])):
        y = F.conv2d(x, w, padding=1)
    assert type(y.grad_fn).__name__ == "ConvBackward"
    y.sum().backward()
    assert y.is_contiguous(memory_format=layout)
    assert x.grad.is_contiguous(memory_format=layout)
