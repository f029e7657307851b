"""Models, clients and requests that the tests of all engines share."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.clients.params import flatten
from mimicfl.data.clients import Clients
from mimicfl.engines.interface import TrainRequest

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
SIZES = (30, 7, 43, 1)  # several full batches, less than one batch, a single sample


class Residual(nn.Module):
    """A residual network with custom parameters, one of them unused; it is not a chain of known layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.same, self.head = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4 * 16, 10)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = F.gelu(self.conv(x))
        return self.head((self.scale * x + torch.tanh(self.same(x))).flatten(1))


class Keywords(nn.Module):
    """Holds its weights directly and calls PyTorch functions with keyword arguments."""

    def __init__(self):
        super().__init__()
        self.kernels, self.offsets = nn.Parameter(0.3 * torch.randn(3, 1, 3, 3)), nn.Parameter(torch.zeros(3))
        self.last = nn.Linear(3 * 4 * 4, 10)

    def forward(self, x):
        x = F.conv2d(input=x, weight=self.kernels, bias=self.offsets, padding=1)
        return self.last(torch.max_pool2d(input=x, kernel_size=2).flatten(1))


class Viewing(nn.Module):
    """Flattens with `view`, which fails on channels-last images."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 3, 3), nn.Linear(3 * 6 * 6, 10)

    def forward(self, x):
        return self.last(self.first(x).view(len(x), -1))


MODELS = {
    "mlp": lambda: mf.models.MLP(64, 12, 10),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 20, 2, dilation=2), nn.ReLU(), nn.Flatten(), nn.Linear(20, 10)
    ),
    "groups": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 10)),
    "wide groups": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.Conv2d(6, 9, (3, 1), stride=(2, 1), padding=(1, 0), groups=3), nn.Flatten(), nn.Linear(162, 10)
    ),
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Conv2d(4, 8, 3, padding="same", groups=4),
        nn.Conv2d(8, 8, 3, stride=2, groups=8),
        nn.Flatten(),
        nn.Linear(32, 10),
    ),
    "residual": Residual,
    "keywords": Keywords,
}


def problem(model, device="cpu", dtype=torch.float64, augment=False, sizes=SIZES):
    x = torch.randint(0, 256, (sum(sizes), 1, 8, 8), dtype=torch.uint8)
    y = torch.arange(len(x)) % 10
    data = mf.Data(x, y, x[:10], y[:10], augment=augment)
    split = np.split(np.random.default_rng(0).permutation(len(x)), np.cumsum(sizes)[:-1])
    return model.to(dtype), Clients(data, split, torch.device(device), dtype)


def request_of(clients, local, t, seed, w, buffers, active, task, eta_L, eta):
    share = torch.full((len(active),), 1 / len(clients), dtype=w.dtype, device=w.device)
    return TrainRequest(t, active, share, w, buffers, task, eta_L, eta, clients, local, seed)


def requests_of(model, clients, local=None, terms=True):
    """Requests of two runs with different models, rounds, rates and active clients; the first has a shift and a proximal term."""
    local = local or mf.LocalSGD(epochs=2, batch_size=8)
    w = flatten(model).to(clients.device)
    buffers = {name: value.to(clients.device) for name, value in model.named_buffers()}
    shift = 0.01 * torch.randn(4, w.numel(), dtype=w.dtype).to(clients.device)
    task = mf.Instructions(shift, 0.1) if terms else mf.Instructions()
    return [
        request_of(clients, local, 3, 5, w, buffers, np.arange(4), task, 0.05, 0.05),
        request_of(clients, local, 1, 6, 1.1 * w, buffers, np.array([0, 1]), mf.Instructions(), 0.02, 0.05),
    ]


def assert_same(ours, plain, rtol=1e-9):
    for mine, true in zip(ours, plain, strict=True):
        scale = float(true.g.abs().max())
        torch.testing.assert_close(mine.g, true.g, rtol=0, atol=rtol * scale)
        torch.testing.assert_close(mine.loss, true.loss, rtol=rtol, atol=rtol)
        assert mine.K.tolist() == true.K.tolist()
        assert mine.buffers.keys() == true.buffers.keys()
        for name, rows in true.buffers.items():
            torch.testing.assert_close(mine.buffers[name], rows, rtol=rtol, atol=rtol, equal_nan=True)
