"""A small deterministic federation, and the simulator's result for the same problem."""

import functools
import logging

import numpy as np
import torch

import mimicfl as mf
from mimicfl.flower import Federation, client_app
from mimicfl.flower.client import model_arrays

N, T = 5, 6
LOCAL = mf.LocalSGD(epochs=2, batch_size=4, lr="geometric:0.05,0.8")
logging.getLogger("flwr").setLevel(logging.ERROR)


@functools.cache
def data_and_split():
    data = mf.datasets.load("synthetic", num_clients=N, dim=6, samples=11, heterogeneity=2.0, seed=3)
    return data, mf.partition.by_ids(data.ids)


def problem(dtype=torch.float32):
    data, split = data_and_split()
    model = mf.models.MLP(6, 4, 1)
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.sin(torch.arange(p.numel(), dtype=torch.float32) + k).view_as(p))
    return data, split, model.to(dtype)


def app(dtype=torch.float32, **options):
    data, split, _ = problem(dtype)

    def data_of(context):
        part = split[int(context.node_config["partition-id"])]
        return data.x_train[part], data.y_train[part], data.x_test, data.y_test

    return client_app(lambda: problem(dtype)[2], data_of, local=LOCAL, loss=data.loss, **options)


def simulated(algorithm, available, dtype=torch.float32, **options):
    """The simulator's result for the same rounds and the same participation."""
    data, split, model = problem(dtype)
    pattern = mf.availability.Explicit(np.asarray(available, dtype=bool))
    return mf.simulate(model, data, split, algorithm, pattern, len(available), local=LOCAL, engine="plain", **options)


def schedule(rounds=T, seed=1):
    available = np.random.default_rng(seed).random((rounds, N)) < 0.5
    available[0] = True
    available[rounds - 2] = False
    return available


def federate(strategy, rounds=T, client=None, dtype=torch.float32, workers=1, **options):
    """`strategy.start` on Flower's in-memory grid, in virtual time; returns the result and the federation."""
    arrays, _ = model_arrays(problem(dtype)[2])
    federation = Federation(client or app(dtype), N)
    with federation.running(workers) as grid:
        return strategy.start(grid, arrays, rounds, **({"timeout": 20.0} | options)), federation


def flat(arrays):
    return torch.cat([torch.from_numpy(a.numpy().reshape(-1).copy()) for a in arrays.values()])


def participation(rows):
    """Whose updates were aggregated in which round, [T, N]."""
    return [[int(str(i) in row["answered"]) for i in range(N)] for row in rows]
