"""Models and runs that the tests of several engines share."""

import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf

from ..conftest import run_on


class Moody(nn.Module):
    """What it computes depends on the data: nothing can trace or stack it."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 10)

    def forward(self, x):
        return self.a(x.flatten(1)) if x.sum() > 0 else self.a(-x.flatten(1))


class Drops(nn.Module):
    """Calls dropout as a function."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x):
        return self.b(F.dropout(torch.relu(self.a(x.flatten(1))), p=0.4, training=self.training))


def accuracy_with_dropout(digits, engine, rounds, epochs):
    """What a network with a dropout layer reaches on digits."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))
    local = mf.LocalSGD(epochs=epochs, lr=0.1)
    return run_on(engine, model=model, data=digits["data"], split=digits["split"], rounds=rounds, local=local).rows[-1]["test_accuracy"]
