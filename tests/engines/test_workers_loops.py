"""Custom local loops on the workers engine see what they see on plain: the model, its gradients and the loss."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.clients.params import Workspace
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.workers import WithLayers, WorkersEngine
from tests.engines.engines import assert_same, problem, request_of


class Images(nn.Module):
    """A compiled convolution, and a parameter without a gradient."""

    def __init__(self):
        super().__init__()
        self.conv, self.head, self.unused = nn.Conv2d(1, 4, 3), nn.Linear(36, 10), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.head(F.max_pool2d(torch.tanh(self.conv(x)), 2).flatten(-3))


def steps(work, value_of):
    """Take a step per batch; weight decay changes every parameter whose gradient is not None."""
    total, optimizer = 0.0, torch.optim.SGD(work.model.parameters(), lr=0.1, weight_decay=0.1)
    for x, y in work.batches:
        optimizer.zero_grad(set_to_none=False)
        value = value_of(x, y)
        value.backward()
        optimizer.step()
        total += value.item()
    return total


def usual(work):
    return steps(work, lambda x, y: work.loss(work.model(x), y))


def with_teacher(work):
    """A copy of the model keeps its weights while the model trains."""
    teacher = copy.deepcopy(work.model)
    return steps(work, lambda x, y: work.loss(work.model(x), y) + 10 * F.mse_loss(work.model(x), teacher(x).detach()))


def one_image(work):
    return steps(work, lambda x, y: work.loss(work.model(x[0])[None], y[:1]))


def reading_the_loss(work):
    return steps(work, lambda x, y: F.cross_entropy(work.model(x), y, reduction=work.loss.reduction, weight=work.loss.weight))


@pytest.mark.slow
@pytest.mark.parametrize("loop", [usual, with_teacher, one_image, reading_the_loss])
@pytest.mark.parametrize("compiles", [True, False], ids=["compiled", "channels last"])
def test_loops_equal_plain(loop, compiles, monkeypatch):
    if not compiles:
        monkeypatch.setattr("mimicfl.engines.workers.engine.compile_layers", lambda *_: None)
    torch.manual_seed(0)
    model, clients = problem(Images(), dtype=torch.float32)
    w, loss = Workspace(model, clients.device).w, nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 10))
    requests = [request_of(clients, mf.Local(loop=loop, epochs=2, batch_size=8), 2, 3, w, {}, np.arange(4), mf.Instructions(), 0.1, 0.1)]
    engine = WorkersEngine(model, clients, loss, workers=2)
    assert isinstance(engine.plain.work.module, WithLayers) == compiles
    assert_same(engine.train(requests), PlainEngine(model, clients, loss).train(requests), rtol=1e-4)


class Rows(nn.Module):
    """Views the results of a wide convolution as rows."""

    def __init__(self):
        super().__init__()
        self.first, self.wide, self.head = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16 * 36, 10)

    def forward(self, x):
        return self.head(torch.relu(self.wide(self.first(x))).view(len(x), -1))


def scripted():
    return torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(64, 70)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize("make", [Rows, scripted])
def test_models_that_compiled_layers_must_not_break(make):
    torch.manual_seed(0)
    model, clients = problem(make(), dtype=torch.float32)
    w, loss = Workspace(model, clients.device).w, nn.CrossEntropyLoss()
    requests = [request_of(clients, mf.LocalSGD(epochs=2, batch_size=8), 2, 3, w, {}, np.arange(4), mf.Instructions(), 0.1, 0.1)]
    engine = WorkersEngine(model, clients, loss, workers=2)
    assert_same(engine.train(requests), PlainEngine(model, clients, loss).train(requests), rtol=1e-4)
