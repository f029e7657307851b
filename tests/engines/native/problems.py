"""Small networks that cover every layer, and a check of their gradients against autograd."""

import shutil

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.clients.params import flatten
from mimicfl.data.clients import Clients
from mimicfl.engines.native.engine import Batches, NativeEngine, Program

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler on this machine")
QUICK = ("-O1", "-march=native")  # compiles fast


def problem(shape, outputs, n=40, loss="cross-entropy"):
    x = torch.randn(n, *shape)
    y = torch.arange(n) % outputs if loss == "cross-entropy" else torch.randn(n, outputs)
    return mf.Data(x, y, x, y)


def native(model, data, loss="cross-entropy"):
    return NativeEngine(model, Clients(data, [np.arange(len(data.x_train))], torch.device("cpu"), torch.float32), as_loss(loss), QUICK)


def linear():
    return nn.Sequential(nn.Linear(6, 4))


def assert_close(ours, theirs, tolerance=2e-5):
    scale = float(theirs.abs().max().clamp_min(1e-3))
    assert float((ours - theirs).abs().max()) <= tolerance * scale


def check_gradients(model, data, loss="cross-entropy", flags=(), batches=(1, 5, 16, 17, 33)):
    """Compare the gradient of one step with autograd, for batches that are smaller than, equal to and larger than the vector lanes."""
    program = Program(model, data, as_loss(loss), flags)
    w = flatten(model)
    pool, target = program.pool(data.x_train), program.target(data.y_train)
    for size in batches:
        rows = np.random.default_rng(size).permutation(len(pool))[:size]
        g, value = program.train(w, pool, target, Batches([(rows, [size])], [0]), [None], 1)
        exact_value = as_loss(loss)(model(data.x_train[rows]), data.y_train[rows])
        exact = torch.cat([p.reshape(-1) for p in torch.autograd.grad(exact_value, list(model.parameters()))])
        assert_close(g[0], exact)
        assert float(value) == pytest.approx(float(exact_value.detach()), rel=1e-5)
    assert_close(program.predict(w, pool, 2), model(data.x_train).detach())


torch.manual_seed(0)  # these weights must not depend on what was imported before
LAYERS = {
    "linear": (nn.Sequential(nn.Linear(7, 3)), (7,)),
    "linear-no-bias": (nn.Sequential(nn.Linear(37, 13, bias=False), nn.ReLU(), nn.Linear(13, 5)), (37,)),
    "tanh": (nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 6), nn.Tanh(), nn.ReLU(), nn.Linear(6, 3)), (9,)),
    "conv": (nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Conv2d(5, 7, 3), nn.Flatten(), nn.Linear(7 * 16, 4)), (2, 8, 8)),
    "conv-stride": (
        nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Conv2d(4, 3, 2, stride=(2, 1)), nn.Flatten(), nn.Linear(12, 4)),
        (1, 10, 8),
    ),
    "conv-padding": (
        nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, (3, 5), padding=(1, 2), bias=False), nn.Flatten(), nn.Linear(100, 3)
        ),
        (3, 5, 5),
    ),
    "conv-both": (
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 9, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3)),
        (2, 8, 7),
    ),
    "conv-1x1": (nn.Sequential(nn.Conv2d(5, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1), nn.Flatten(), nn.Linear(32, 3)), (5, 4, 4)),
    "conv-wide": (nn.Sequential(nn.Conv2d(1, 2, (1, 11)), nn.Conv2d(2, 2, (3, 9)), nn.Flatten(), nn.Linear(2 * 2 * 12, 3)), (1, 4, 30)),
    "max-pool": (nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 9, 3)), (1, 8, 8)),
    "max-pool-overlap": (nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3)), (1, 9, 9)),
    "max-pool-rest": (nn.Sequential(nn.Conv2d(1, 3, 2), nn.MaxPool2d((2, 3)), nn.Flatten(), nn.Linear(3 * 3 * 2, 3)), (1, 8, 9)),
    "avg-pool": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, 3)), (2, 7, 7)),
    "pool-first": (nn.Sequential(nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(18, 3)), (1, 8, 8)),
    "lenet": (mf.models.LeNet(), (1, 28, 28)),
}
# Networks whose channels are in the lanes: images of different channels, larger and smaller than a tile, padding of every kind.
WIDE = {
    "winograd": (
        nn.Sequential(
            *[nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
            *[nn.Linear(32 * 9, 21), nn.ReLU(), nn.Linear(21, 10)],
        ),
        (3, 10, 10),
    ),
    "winograd-padding": (
        nn.Sequential(
            *[nn.Conv2d(2, 16, 1), nn.Conv2d(16, 48, 3, padding=1), nn.Tanh(), nn.Conv2d(48, 80, 3, padding=(0, 2), bias=False)],
            *[nn.MaxPool2d(3, 2), nn.ReLU(), nn.Conv2d(80, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 6, 37)],
        ),
        (2, 7, 6),
    ),
    "wide-direct": (
        nn.Sequential(
            *[nn.Conv2d(2, 16, 5, padding=2, stride=2, bias=False), nn.Tanh(), nn.Conv2d(16, 48, 3, padding=1), nn.AvgPool2d(2, 1)],
            *[nn.Conv2d(48, 16, (3, 2), stride=(1, 2), padding=(0, 1)), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(16, 7, bias=False)],
        ),
        (2, 14, 15),
    ),
    "wide-output": (nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3), nn.Flatten()), (1, 3, 3)),
}
LAYERS |= WIDE
