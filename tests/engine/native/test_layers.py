"""Every layer, batch and width against autograd."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from mimicfl.engine.native.trace import trace

from .problems import LAYERS, check_gradients, needs_compiler, problem

pytestmark = needs_compiler


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_against_autograd(name):
    model, shape = LAYERS[name]
    outputs = model(torch.zeros(1, *shape)).shape[1]
    check_gradients(model, problem(shape, outputs))


def test_mean_squared_error_against_autograd():
    check_gradients(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), problem((6,), 3, loss="mse"), "mse")


@pytest.mark.parametrize("flags", [("-DLANES=8", "-mavx2", "-mfma"), ("-DLANES=4",), ("-DLANES=1",)], ids=lambda f: f[0])
def test_every_width_is_right(flags):
    if "-mavx2" in flags and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    for name in ("lenet", "conv-both"):
        model, shape = LAYERS[name]
        check_gradients(model, problem(shape, model(torch.zeros(1, *shape)).shape[1]), flags=flags, batches=(3, 16, 19))


@st.composite
def networks(draw):
    """A random chain that fits its input."""
    c, h, w = draw(st.integers(1, 4)), draw(st.integers(5, 13)), draw(st.integers(5, 13))
    shape, layers = (c, h, w), []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["conv", "conv", "max", "avg"]))
        k = (draw(st.integers(1, min(4, h))), draw(st.integers(1, min(4, w))))
        s = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
        if kind == "conv":
            p, out = draw(st.integers(0, min(k) - 1)) if min(k) > 1 else 0, draw(st.integers(1, 9))
            layers.append(nn.Conv2d(c, out, k, s, p, bias=draw(st.booleans())))
            c, h, w = out, (h + 2 * p - k[0]) // s[0] + 1, (w + 2 * p - k[1]) // s[1] + 1
        else:
            layers.append((nn.MaxPool2d if kind == "max" else nn.AvgPool2d)(k, s))
            h, w = (h - k[0]) // s[0] + 1, (w - k[1]) // s[1] + 1
        if draw(st.booleans()):
            layers.append(draw(st.sampled_from([nn.ReLU, nn.Tanh]))())
    layers.append(nn.Flatten())
    width = c * h * w
    for _ in range(draw(st.integers(0, 1))):
        out = draw(st.integers(1, 40))
        layers += [nn.Linear(width, out), nn.ReLU()]
        width = out
    return nn.Sequential(*layers, nn.Linear(width, draw(st.integers(2, 12)))), shape


@given(networks(), st.integers(1, 40))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_random_networks_against_autograd(network, size):
    model, shape = network
    data = problem(shape, model[-1].out_features)
    if float(model(data.x_train).detach().abs().max()) > 0:
        check_gradients(model, data, batches=(size,))


class Functional(nn.Module):
    """The same LeNet idea without a single nn.ReLU or nn.Flatten."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2, self.f1, self.f2 = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 8, 3), nn.Linear(8, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = torch.tanh(self.c2(x))
        return self.f2(torch.relu(self.f1(torch.flatten(x, 1))))


def test_networks_are_found_by_what_they_do():
    kinds = [layer.kind for layer in trace(Functional(), (1, 8, 8))]
    assert kinds == ["conv", "max_pool", "relu", "conv", "tanh", "linear", "relu", "linear"]
    check_gradients(Functional(), problem((1, 8, 8), 10))
