"""Custom losses, partitions and learning rates can be registered and used by name in settings."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.clients.losses import LOSSES


@pytest.mark.slow
def test_register_a_custom_loss(digits, tmp_path):
    @mf.losses.register("smoothed")
    def smoothed(output, target):
        return F.cross_entropy(output, target, label_smoothing=0.2) - 5  # negative, unlike the built-in losses

    e = mf.Experiment(rounds=2, loss="smoothed", partition="shards:2", availability="always", lr=0.05, diagnose="every=1")
    named = mf.run(e, tmp_path / "named")
    assert named.rows[-1]["test_loss"] < -2
    given = {**digits, "rounds": 2, "loss": smoothed, "local": mf.LocalSGD(epochs=5, lr=0.05)}
    assert torch.equal(named.params, mf.simulate(**given).params)
    assert all(torch.equal(a, b) for a, b in zip(mf.read(tmp_path / "named").model().parameters(), named.model().parameters(), strict=True))
    del LOSSES.factories["smoothed"]
    assert mf.read(tmp_path / "named").model() is not None  # reading the model does not need the loss


def test_register_a_custom_partition():
    @mf.partition.register("halves")
    def halves(labels, num_clients, seed, unequal=1):
        return np.array_split(np.arange(len(labels)), num_clients)

    history = mf.run(mf.Experiment(rounds=1, partition="halves:2", num_clients=4, availability="always"))
    assert history.num_clients == 4


@pytest.mark.slow
@pytest.mark.parametrize("takes_active", [False, True])
def test_register_a_custom_learning_rate(takes_active):
    @mf.lr.register("cosine")
    @dataclasses.dataclass(frozen=True)
    class Cosine:
        rate: float
        rounds: int

        def __call__(self, t):
            return self.rate * (1 + np.cos(np.pi * t / self.rounds)) / 2

    if takes_active:
        Cosine.__call__ = lambda self, t, active: self.rate * (1 + np.cos(np.pi * t / self.rounds)) / 2
    for lr in ("cosine:0.1,4", Cosine(0.1, 4)):
        rows = mf.run(mf.Experiment(rounds=3, lr=lr, availability="always")).rows
        assert [row["local_lr"] for row in rows] == pytest.approx([0.1, 0.1 * (1 + 2**-0.5) / 2, 0.05])
