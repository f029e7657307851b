"""Models and runs that the tests of several engines share."""

import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from tests.conftest import run_on


class DataDependent(nn.Module):
    """Its control flow depends on the data, so it can be neither traced nor stacked."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 10)

    def forward(self, x):
        return self.a(x.flatten(1)) if x.sum() > 0 else self.a(-x.flatten(1))


class FunctionalDropout(nn.Module):
    """Calls dropout as a function."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x):
        return self.b(F.dropout(torch.relu(self.a(x.flatten(1))), p=0.4, training=self.training))


def accuracy_with_dropout(digits, engine, rounds, epochs):
    """Train a network with a dropout layer on digits and return its final test accuracy."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))
    local = mf.LocalSGD(epochs=epochs, lr=0.1)
    return run_on(engine, model=model, data=digits["data"], split=digits["split"], rounds=rounds, local=local).rows[-1]["test_accuracy"]
