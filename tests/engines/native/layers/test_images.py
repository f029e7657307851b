"""Compiled convolutions and pooling equal PyTorch's, forward and backward, for all supported shapes."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.data.clients import Clients
from mimicfl.engines.capabilities import Unsupported
from mimicfl.engines.native.layers import LayerOverrides, Layers, compile_layers, convolution, linear, overrides
from mimicfl.seeds import stream

from .compare import assert_close, both, compiled, grads, layouts, penalty, seen


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 10])
def test_wide_convolutions(batch):
    """Images of less than a tile and with incomplete tiles, without and with padding, a bias, and channels in all widths of a panel."""

    def build():
        wide = [nn.Conv2d(16, 32, 3), nn.Conv2d(32, 48, 3, padding=(2, 0), bias=False), nn.ReLU(), nn.Conv2d(48, 128, 3, padding=1)]
        return nn.Sequential(*wide, nn.MaxPool2d(2), nn.Conv2d(128, 16, 3, padding=2), nn.Conv2d(16, 16, 3))

    shapes = seen(lambda: build()(torch.randn(batch, 16, 11, 14)))
    assert [kind for kind, _ in shapes] == ["ChannelsLast"] * 3 + ["MaxPool"] + ["ChannelsLast"] * 2
    found = both(build, torch.randn(batch, 16, 11, 14))
    assert_close(found)
    torch.manual_seed(0)
    net, x = build(), torch.randn(batch, 16, 11, 14)
    with torch.no_grad():
        with LayerOverrides(Layers(shapes)):
            ours = net(x).double()
        single, theirs = net(x).double(), net.double()(x.double())
    scale = float(theirs.abs().max())
    assert float((ours - theirs).abs().max()) <= max(5 * float((single - theirs).abs().max()), 1e-6 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_wide_convolutions_of_few_pixels(few, stride, monkeypatch):
    """PyTorch runs them in its default layout; either way the result has the layout of the images."""
    monkeypatch.setattr(convolution, "PAIRS_PER_PIXEL", 0 if few else 10**9)
    given = torch.randn(3, 16, 9, 9), torch.randn(32, 16, 3, 3), torch.randn(32)

    def call(*leaves):
        return F.conv2d(*leaves, stride=stride, padding=1)

    used = []
    monkeypatch.setattr(convolution, "_in_default_layout", lambda *a, run=convolution._in_default_layout: used.append(1) or run(*a))
    for name, x in layouts(given[0]).items():
        leaves = [each.requires_grad_() for each in (x.detach(), *given[1:])]
        shapes = [shape for shape in seen(lambda leaves=leaves: call(*leaves)) if shape]
        true = grads(call, leaves)
        used.clear()
        with LayerOverrides(Layers(shapes)):
            ours = grads(call, leaves)
        assert_close((true, ours))
        assert ours[0].stride() == true[0].stride()
        assert bool(used) == (few and (stride == 1 or name == "channels last"))


POOLS = [nn.MaxPool2d(2), nn.MaxPool2d(3, stride=2), nn.MaxPool2d((2, 3), stride=(1, 4)), nn.MaxPool2d(2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_max_pooling(pool):
    x = torch.randn(5, 3, 11, 13)
    assert_close(both(lambda: pool, x))
    x = torch.randint(0, 3, x.shape).float()  # many ties: the first maximum gets the gradient
    assert_close(both(lambda: pool, x))


@pytest.mark.slow
@pytest.mark.parametrize("channels", [16, 37])
@pytest.mark.parametrize("sides", [(11, 13), (12, 12)], ids=["rest", "whole"])
def test_max_pooling_of_channels_last_images(channels, sides):
    rng = torch.Generator().manual_seed(0)
    for values in (torch.randn(3, channels, *sides, generator=rng), torch.randint(0, 3, (3, channels, *sides), generator=rng).float()):
        x = values.contiguous(memory_format=torch.channels_last).requires_grad_()
        for pool in POOLS:
            true = grads(pool, [x])
            layers = compiled(lambda x=x, pool=pool: pool(x))
            assert [shape[0] for shape in layers.known if shape] == ["MaxPoolLast"]
            with LayerOverrides(layers):
                assert_close((true, grads(pool, [x])))
                ours = penalty(pool, [x])
                assert pool(x).is_contiguous(memory_format=torch.channels_last)
            assert_close((penalty(pool, [x]), ours))


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 20])
def test_nan_stays_nan(channels):
    x = torch.zeros(1, channels, 4, 4)
    x[0, 0, 0, 1], x[0, 0, 1, 1] = float("nan"), 5.0
    for given in layouts(x).values():
        with LayerOverrides(compiled(lambda given=given: F.max_pool2d(given, 2))):
            y = F.max_pool2d(given, 2)
        assert torch.equal(y.isnan(), F.max_pool2d(x, 2).isnan())


def conv_arguments(rng):
    """Return random arguments of conv2d, with sizes as numbers, tuples or lists."""
    kernel, stride, padding = ([int(n) for n in rng.integers(low, 4, 2)] for low in (1, 1, 0))
    forms = (lambda s: tuple(s), lambda s: list(s), lambda s: s[0])
    form = forms[rng.integers(3)]
    if form is forms[2]:
        stride, padding = [stride[0]] * 2, [padding[0]] * 2
    shape = [int(n) for n in rng.integers(1, 6, 2)] + kernel
    named = {"stride": form(stride), "padding": form(padding), "dilation": form([1, 1]), "groups": 1}
    return shape, bool(rng.integers(2)), named


@pytest.fixture
def table():
    """Random calls of layers, compiled into one library."""
    rng, calls, recorded = stream(5, "layers"), [], LayerOverrides(None)
    for _ in range(10):
        shape, biased, named = conv_arguments(rng)
        x = torch.from_numpy(rng.normal(size=(int(rng.choice([1, 2, 9, 17])), shape[1], 7, 6))).float()
        w, b = torch.from_numpy(rng.normal(size=shape)).float(), torch.from_numpy(rng.normal(size=shape[0])).float() if biased else None
        calls.append((lambda x, w, b, named=named: F.conv2d(x, w, b, **named), x, w, b))
    for kernel, named in [
        ((2, 3), {}),
        ([2], {"stride": (1, 2)}),
        (3, {"stride": [2], "ceil_mode": False}),
        (2, {"stride": 3, "dilation": (1, 1)}),
    ]:
        x = torch.from_numpy(rng.integers(0, 4, size=(3, 2, 7, 6))).float()  # many equal values
        calls.append((lambda x, w, b, kernel=kernel, named=named: F.max_pool2d(x, kernel, **named), x, None, None))
    with recorded:
        for call, *given in calls:
            call(*given)
    assert len(recorded.shapes) == len(calls)
    return calls, Layers(list(dict.fromkeys(recorded.shapes)))


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [(), (0,), (1, 2), (0, 1, 2)], ids=["none", "input", "weights", "all"])
def test_random_calls_equal_pytorch(table, frozen):
    calls, layers = table
    for call, *given in calls:
        for x in layouts(given[0]).values():
            leaves = [None if t is None else t.detach().requires_grad_(k not in frozen) for k, t in enumerate((x, *given[1:]))]
            true = grads(call, leaves)
            with LayerOverrides(layers):
                ours = grads(call, leaves)
            for a, b in zip(ours, true, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * float(b.abs().max().clamp_min(1.0)))


@pytest.mark.slow
def test_second_derivatives_equal_pytorch(table):
    calls, layers = table

    for call, *given in calls:
        for x in layouts(given[0]).values():
            leaves = [t.detach().requires_grad_() for t in (x, *given[1:]) if t is not None]
            padded = lambda *t, call=call: call(*t, *[None] * (3 - len(t)))  # noqa: E731
            true = penalty(padded, leaves)
            with LayerOverrides(layers):
                ours = penalty(padded, leaves)
            for a, b in zip(ours, true, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-3 * float(b.abs().max().clamp_min(1.0)))


def test_results_do_not_depend_on_the_default_dtype(table):
    calls, layers = table
    for call, *given in calls:
        true = call(*given)
        torch.set_default_dtype(torch.float64)
        try:
            with LayerOverrides(layers):
                ours = call(*given)
        finally:
            torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(ours, true, rtol=0, atol=1e-4 * float(true.abs().max().clamp_min(1.0)))


class Branches(nn.Module):
    """Not a chain: a convolution that is used twice, sums, and transposed images."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4 * 25, 10)

    def forward(self, x):
        x = torch.relu(self.one(x.transpose(2, 3)))
        x = self.two(x) + self.two(x.flip(2)) + x
        return self.head(F.max_pool2d(x, 2).flatten(1))


@pytest.mark.slow
def test_model_that_is_not_a_chain():
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
        lambda x: F.conv2d(x, torch.randn(40, 2, 3, 3)),  # PyTorch is faster for many channels
        lambda x: F.max_pool2d(x, 2, padding=1),
        lambda x: F.max_pool2d(x, 3, ceil_mode=True),
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
        lambda x: F.conv2d(x.double(), torch.randn(4, 2, 3, 3).double()),
        lambda x: F.conv2d(x[:0], torch.randn(4, 2, 3, 3)),
        lambda x: F.conv2d(x[0], torch.randn(4, 2, 3, 3)),
        lambda x: F.max_pool2d(x[:0], 2),
        lambda x: F.max_pool2d(x, 2, 2, 0, 1, False, True)[0],
        lambda x: torch.autocast("cpu", torch.bfloat16)(F.conv2d)(x, torch.randn(4, 2, 3, 3)),
        lambda x: F.conv2d(torch.complex(x, x).conj().imag, torch.randn(4, 2, 3, 3)),  # its memory holds the negated values
    ],
)
def test_unsupported_calls_use_pytorch(call):
    assert seen(lambda: call(torch.randn(2, 2, 8, 8))) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.conv2d(x, torch.randn(4, 3, 3, 3)),  # wrong number of channels
        lambda x: F.conv2d(x, torch.randn(4, 2, 9, 9)),  # a kernel larger than the image
        lambda x: F.conv2d(x, torch.randn(4, 2, 3, 3), torch.randn(5)),
        lambda x: F.conv2d(x, torch.randn(4, 2, 3, 3), torch.randn(4).double()),
        lambda x: F.conv2d(x, torch.randn(4, 2, 3, 3), stride=0),
        lambda x: F.conv2d(x, torch.randn(4, 2, 3, 3), stride=(1, 1, 1)),
        lambda x: F.conv2d(x, torch.randn(4, 2, 3, 3), padding=()),
        lambda x: F.conv2d(x, torch.randn(4, 2, 3, 3), padding=-1),
        lambda x: F.max_pool2d(x, 2, stride=0),
        lambda x: F.max_pool2d(x, 9),
        lambda x: torch.max_pool2d(x, 2, steps=0),
        lambda x: torch.conv2d(x),
    ],
)
def test_invalid_calls_raise_the_error_of_pytorch(call):
    x, recorded = torch.randn(2, 2, 8, 8), LayerOverrides(None)
    with pytest.raises((RuntimeError, TypeError)) as true:
        call(x)
    with recorded, pytest.raises(type(true.value)) as ours:
        call(x)
    assert str(ours.value).splitlines()[0] == str(true.value).splitlines()[0]
    assert recorded.shapes == []


@pytest.mark.slow
def test_shapes_that_were_not_compiled_use_pytorch():
    conv = nn.Conv2d(1, 2, 3)
    layers = Layers([("Convolution", (1, 8, 8, 2, 3, 3, 1, 1, 0, 0))])
    for side in (8, 9):
        x = torch.randn(3, 1, side, side)
        with LayerOverrides(layers):
            y = conv(x)
        torch.testing.assert_close(y, conv(x), rtol=1e-5, atol=1e-5)


def test_no_layers_without_a_gain_or_a_compiler(monkeypatch):
    images, loss = clients_of(torch.randn(4, 1, 8, 8)), nn.CrossEntropyLoss()
    assert compile_layers(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), images, loss) is None
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10))
    assert compile_layers(net, images, loss) is not None
    assert compile_layers(net.double(), clients_of(torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.float64), loss) is None

    def missing(source):
        raise Unsupported("no C++ compiler was found")

    monkeypatch.setattr(overrides, "load", missing)
    assert compile_layers(net.float(), images, loss) is None
    monkeypatch.setattr(overrides, "load", lambda source: 1 / 0)
    assert compile_layers(net.float(), images, loss) is None


def test_calls_that_need_no_compiler_are_replaced_without_one(monkeypatch):
    monkeypatch.setattr(linear, "faster", lambda: True)
    monkeypatch.setattr(overrides, "load", lambda source: 1 / 0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 200))
    layers = compile_layers(net, clients_of(torch.randn(4, 1, 8, 8)), nn.CrossEntropyLoss())
    assert list(layers.known) == [None]
