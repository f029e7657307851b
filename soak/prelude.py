"""The names that generated calls may use."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

import mimicfl as mf

__all__ = ["Path", "bytes_", "data", "experiment", "mf", "model", "nn", "np", "real", "split", "torch", "x", "y"]

_generator = torch.Generator().manual_seed(0)
x, y = torch.randn(24, 6, generator=_generator), torch.arange(24) % 3
data = mf.Data(x, y, x[:9], y[:9])
real = mf.Data(x, x[:, :1], x[:9], x[:9, :1])
_images = (x * 9).abs().to(torch.uint8).view(24, 1, 2, 3)
bytes_ = mf.Data(_images, y, _images[:9], y[:9], scale=9.0)
split = [np.arange(i, 24, 4) for i in range(4)]
model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
with torch.no_grad():
    for _p in model.parameters():
        _p.copy_(torch.randn(_p.shape, generator=_generator) / 3)
experiment = mf.Experiment(num_clients=4, rounds=2, steps=1, model="linear", availability="always", engine="plain")
torch.manual_seed(0)  # modules created by a call draw their weights from this generator
