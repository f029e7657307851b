"""Networks that native compiles equal autograd however they are written; others are refused with the correct reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.engines.native import Unsupported, network
from mimicfl.engines.native import engine as engine_module
from mimicfl.engines.native.channels_last import suits_channels_last
from mimicfl.engines.native.engine import Program
from mimicfl.engines.native.trace import trace
from tests.engines.native.problems import QUICK, WIDE, check_gradients, linear, native, needs_compiler, problem

pytestmark = needs_compiler


class View(nn.Module):
    def __init__(self, change, rest):
        super().__init__()
        self.change, self.rest = change, rest

    def forward(self, x):
        return self.rest(self.change(x))


def conv(*rest, **settings):
    return nn.Sequential(nn.Conv2d(2, 3, 3, **settings), *rest)


EQUAL = {
    "inplace relu": (nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)), (6,)),
    "relu on inputs": (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 4)), (6,)),
    "reshape to images": (View(lambda x: x.reshape(-1, 1, 6, 6), nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(48, 4))), (36,)),
    "unflatten": (nn.Sequential(nn.Unflatten(1, (2, 3, 6)), nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4)), (36,)),
    "view by size": (View(lambda x: x.view(x.size(0), -1), nn.Linear(36, 4)), (1, 6, 6)),
    "view by shape": (View(lambda x: x.reshape(x.shape[0], x.shape[1] * 36), nn.Linear(72, 4)), (2, 6, 6)),
    "flatten twice": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(2), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)), (2, 6, 6)),
    "no bias": (conv(nn.Flatten(), nn.Linear(48, 4, bias=False), bias=False), (2, 6, 6)),
    "padding over kernel": (nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 3, 2, padding=3), nn.Flatten(), nn.Linear(243, 4)), (2, 4, 4)),
    "stride over kernel": (nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 3, 2, stride=3), nn.Flatten(), nn.Linear(12, 4)), (2, 6, 5)),
    "pool by its input": (View(lambda x: F.avg_pool2d(torch.tanh(x), x.size(2)), nn.Sequential(nn.Flatten(), nn.Linear(2, 4))), (2, 6, 6)),
    "pool tuples": (conv(nn.MaxPool2d((2,), stride=[1, 2]), nn.Flatten(), nn.Linear(18, 4)), (2, 6, 6)),
    "functional pool": (
        View(lambda x: F.max_pool2d(input=x, kernel_size=[2, 3]), nn.Sequential(nn.Flatten(), nn.Linear(12, 4))),
        (2, 6, 6),
    ),
    "one class": (nn.Sequential(nn.Linear(6, 1)), (6,)),
    "whole image": (nn.Sequential(nn.Conv2d(2, 4, 6), nn.Flatten()), (2, 6, 6)),
    "dropout of nothing": (nn.Sequential(nn.Dropout(0.0), nn.Linear(6, 4)), (6,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL)
def test_chains_written_in_different_ways_equal_autograd(name):
    model, shape = EQUAL[name]
    data = problem(shape, 1 if name == "one class" else 4, n=400)
    if not name.startswith("view"):  # `view` needs contiguous inputs; the others accept any layout
        data = mf.Data(data.x_train.transpose(0, -1).contiguous().transpose(0, -1), data.y_train, data.x_test, data.y_test)
    native(model, data)
    check_gradients(model, data, flags=QUICK, batches=(1, 33, 400))


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_channels_in_the_lanes_equal_autograd(name):
    model, shape = WIDE[name]
    assert suits_channels_last(trace(model, shape))
    outputs = model(torch.zeros(1, *shape)).shape[1]
    check_gradients(model, problem(shape, outputs), flags=QUICK, batches=(1, 10, 33))


class CustomLinear(nn.Linear):
    """A custom layer class."""


def with_hook():
    model = linear()
    model[0].register_forward_hook(lambda module, given, output: 2 * output)
    return model


def weight_norm():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)))


class KeepsDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Dropout(0.5), nn.Linear(6, 4)

    def train(self, mode=True):
        super().train(mode)
        self.a.eval()
        return self

    def forward(self, x):
        return self.b(self.a(x))


FLAT, IMAGE = (6,), (2, 6, 6)
REASONS = [
    (weight_norm, FLAT, "ParametrizedLinear"),
    (with_hook, FLAT, "hooks"),
    (lambda: nn.Sequential(CustomLinear(6, 4)), FLAT, "tensor 0.weight outside of a layer"),
    (KeepsDropout, FLAT, "replaces forward, train or eval"),
    (lambda: conv(nn.Flatten(), nn.Linear(1, 4)), IMAGE, "fails on samples"),
    (lambda: View(lambda x: x.reshape(-1, 6, 6), nn.Sequential(nn.Flatten(), nn.Linear(36, 4))), IMAGE, "one row per sample"),
    (lambda: nn.Sequential(nn.Flatten(2), nn.Linear(36, 4), nn.Flatten(), nn.Linear(8, 4)), IMAGE, "samples of 2 dimensions, not to flat"),
    (lambda: nn.Sequential(nn.Linear(6, 4), nn.Flatten(), nn.Linear(48, 4)), IMAGE, "samples of 3 dimensions, not to flat"),
    (lambda: nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9, 4)), (6, 6), "samples of 2 dimensions, not to images"),
    (lambda: conv(nn.Flatten(), nn.Linear(12, 4), dilation=2), IMAGE, "dilation"),
    (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 4)), IMAGE, "groups=2"),
    (lambda: conv(nn.Flatten(), nn.Linear(108, 4), padding="same"), IMAGE, "padding='same'"),
    (lambda: conv(nn.Flatten(), nn.Linear(108, 4), padding=1, padding_mode="circular"), IMAGE, "padding_mode='circular'"),
    (lambda: conv(nn.MaxPool2d(3, ceil_mode=True), nn.Flatten(), nn.Linear(12, 4)), IMAGE, "ceil_mode=True"),
    (lambda: conv(nn.AvgPool2d(2, padding=1), nn.Flatten(), nn.Linear(27, 4)), IMAGE, "padding=1"),
    (lambda: conv(nn.MaxPool2d(2, dilation=2), nn.Flatten(), nn.Linear(3, 4)), IMAGE, "dilation=2"),
    (lambda: conv(nn.AvgPool2d(2, divisor_override=3), nn.Flatten(), nn.Linear(12, 4)), IMAGE, "divisor_override=3"),
    (lambda: conv(), IMAGE, "one row of numbers per sample"),
    (lambda: View(lambda x: x.view(torch.int32), linear()), FLAT, "fails on samples|not a float32"),
    (lambda: View(lambda x: x[:, :6], linear()), FLAT, "getitem"),
    (lambda: nn.Sequential(nn.Flatten()), FLAT, "no layer with weights"),
]


@pytest.mark.parametrize(("make", "shape", "words"), REASONS, ids=[words for *_, words in REASONS])
def test_refusal_gives_the_correct_reason(make, shape, words):
    with pytest.raises(Unsupported, match=words):
        native(make(), problem(shape, 4))


@pytest.mark.parametrize("where", ["generate", "open_library", "verify", "loss_name"])
@pytest.mark.parametrize(
    ("fault", "meaning"),
    [(ZeroDivisionError("odd"), Unsupported), (MemoryError(), MemoryError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_any_error_while_preparing_means_unsupported(where, fault, meaning, monkeypatch):
    def fail(*given):
        raise fault

    monkeypatch.setattr(network if where == "loss_name" else engine_module, where, fail)
    with pytest.raises(meaning):
        native(linear(), problem((6,), 4))


@pytest.mark.slow
@pytest.mark.parametrize("rest", [[nn.ReLU()], [nn.MaxPool2d(2)], [nn.ReLU(), nn.MaxPool2d(2)], [nn.MaxPool2d(2, 1), nn.ReLU()]])
def test_overflow_is_detected(rest):
    """inf - inf is NaN in the first layer; a ReLU or pooling layer that dropped it would hide divergence."""
    model = nn.Sequential(nn.Conv2d(2, 3, 1), *rest, nn.Flatten())
    model.append(nn.Linear(model(torch.zeros(1, 2, 4, 4)).shape[1], 4))
    program = Program(model, problem((2, 4, 4), 4), as_loss("cross-entropy"), QUICK)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([3e38, -3e38]).view(1, 2, 1, 1).expand(3, 2, 1, 1))
    x = torch.full((5, 2, 4, 4), 9.0)
    w = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert model(x).isnan().all()
    assert program.predict(w, x, 1).isnan().all()
    assert program.step(w, x, torch.zeros(5, dtype=torch.long))[1].isnan()
