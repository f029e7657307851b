"""The common workload: 30 clients with 2,000 images each, the paper's LeNet, batch size 16, five local epochs, SGD with rate 0.01.

The data are generated from a seed in every environment; this module does not import mimicfl.
"""

import json
import sys
import time

import numpy as np
import torch
from torch import nn

CLIENTS, SAMPLES, BATCH, EPOCHS, RATE = 30, 2000, 16, 5, 0.01
STEPS = EPOCHS * SAMPLES // BATCH


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return float32 images [clients, samples, 1, 28, 28] and labels of two classes per client."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(CLIENTS, SAMPLES, 1, 28, 28)).astype(np.float32)
    y = np.stack([np.arange(SAMPLES) % 2 + 2 * (i % 5) for i in range(CLIENTS)])
    return x, y.astype(np.int64)


def lenet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
        *[nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)],
    )


def arguments() -> tuple[int, int]:
    """Return the number of clients per round and the number of rounds."""
    return int(sys.argv[1]), int(sys.argv[2])


class Clock:
    """Measures rounds: call `tick` after every round. The first round is a warm-up and is not counted."""

    WARM_UP = 1

    def __init__(self, cohort: int) -> None:
        self.cohort, self.ticks = cohort, [time.perf_counter()]

    def tick(self) -> None:
        self.ticks.append(time.perf_counter())

    def report(self) -> None:
        rounds = np.diff(self.ticks)[self.WARM_UP :]
        print("RESULT " + json.dumps([1e6 * r / (self.cohort * STEPS) for r in rounds]), flush=True)
