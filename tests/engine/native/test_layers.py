"""The compiled single layers against PyTorch's, forward and backward, in every shape they take."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.data.clients import Clients
from mimicfl.engine.native import layers as module
from mimicfl.engine.native.layers import Layers, Quick, quick_layers
from mimicfl.engine.support import Unsupported


def both(build, x, layers=None):
    """Output and gradients of a model, by PyTorch and inside `Quick`."""
    found = []
    for quick in (False, True):
        torch.manual_seed(0)
        net, own = build(), x.clone().requires_grad_()
        if quick:
            seen = Quick(None)
            with seen:
                net(own)
            assert seen.shapes
            with Quick(layers or Layers(list(dict.fromkeys(seen.shapes)))):
                y = net(own)
        else:
            y = net(own)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        found.append([y.detach(), own.grad, *[p.grad for p in net.parameters()]])
    return found


def assert_close(found):
    for true, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, true, rtol=0, atol=1e-4 * float(true.abs().max().clamp_min(1.0)))


@pytest.mark.parametrize("batch", [1, 7, 16, 33])
@pytest.mark.parametrize(
    "conv",
    [
        lambda: nn.Conv2d(1, 6, 5),
        lambda: nn.Conv2d(3, 20, (3, 2), stride=(2, 1), padding=(1, 0)),
        lambda: nn.Conv2d(4, 5, 3, padding=2, bias=False),
        lambda: nn.Conv2d(2, 3, 1, stride=3),
    ],
)
def test_convolutions(conv, batch):
    assert_close(both(conv, torch.randn(batch, conv().in_channels, 11, 9)))


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, stride=2), nn.MaxPool2d((2, 3), stride=(1, 4)), nn.MaxPool2d(2, 3)])
def test_max_pooling(pool):
    x = torch.randn(5, 3, 11, 13)
    assert_close(both(lambda: pool, x))
    x = torch.randint(0, 3, x.shape).float()  # many equals: the first gets the gradient
    assert_close(both(lambda: pool, x))


def test_nan_stays_nan():
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 0, 1], x[0, 0, 1, 1] = float("nan"), 5.0
    with Quick(Layers([("MaxPool", (4, 4, 2, 2, 2, 2))])):
        y = F.max_pool2d(x, 2)
    assert torch.equal(y.isnan(), F.max_pool2d(x, 2).isnan())


class Branches(nn.Module):
    """No chain: the same convolution twice, a sum, a pooled side way, and images whose layout is not the usual one."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4 * 25, 10)

    def forward(self, x):
        x = torch.relu(self.one(x.transpose(2, 3)))
        x = self.two(x) + self.two(x.flip(2)) + x
        return self.head(F.max_pool2d(x, 2).flatten(1))


def test_in_a_model_that_is_no_chain():
    assert_close(both(Branches, torch.randn(6, 2, 10, 10)))


def clients_of(x, dtype=torch.float32):
    y = torch.arange(len(x)) % 10
    return Clients(mf.Data(x, y, x[:2], y[:2]), [np.arange(len(x))], torch.device("cpu"), dtype)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.conv2d(x, torch.randn(2, 1, 3, 3), groups=2),
        lambda x: F.conv2d(x, torch.randn(4, 2, 2, 2), dilation=2),
        lambda x: F.conv2d(x, torch.randn(4, 2, 3, 3), padding="same"),
        lambda x: F.conv2d(x, torch.randn(40, 2, 3, 3)),  # PyTorch's is faster there
        lambda x: F.max_pool2d(x, 2, padding=1),
        lambda x: F.max_pool2d(x, 3, ceil_mode=True),
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
        lambda x: F.conv2d(x.double(), torch.randn(4, 2, 3, 3).double()),
    ],
)
def test_everything_else_is_left_to_pytorch(call):
    seen = Quick(None)
    with seen:
        call(torch.randn(2, 2, 8, 8))
    assert seen.shapes == []


def test_a_shape_that_was_not_compiled_is_left_to_pytorch():
    conv = nn.Conv2d(1, 2, 3)
    quick = Layers([("Convolution", (1, 8, 8, 2, 3, 3, 1, 1, 0, 0))])
    for side in (8, 9):
        x = torch.randn(3, 1, side, side)
        with Quick(quick):
            y = conv(x)
        torch.testing.assert_close(y, conv(x), rtol=1e-5, atol=1e-5)


def test_nothing_to_gain_and_no_compiler(monkeypatch):
    images = clients_of(torch.randn(4, 1, 8, 8))
    assert quick_layers(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), images) is None
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10))
    assert quick_layers(net, images) is not None
    assert quick_layers(net.double(), clients_of(torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.float64)) is None

    def missing(source):
        raise Unsupported("no C++ compiler was found")

    monkeypatch.setattr(module, "load", missing)
    assert quick_layers(net.float(), images) is None
