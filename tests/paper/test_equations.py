"""One test per numbered statement of the paper that the code implements, with K = 1 and full batches where the paper has them."""

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl.clients.losses import mse
from mimicfl.data.arrays import as_split
from mimicfl.data.clients import Clients
from mimicfl.engines.plain import PlainEngine
from tests.conftest import random_schedule
from tests.engines.engines import request_of

ETA = 0.03


def gradient(data, part, w):
    x, y = data.x_train.numpy()[part], data.y_train.numpy()[part, 0]
    return x.T @ (x @ w - y) / len(part)


def path(quadratic, algorithm, schedule, **options):
    """w_0, w_1, ..., w_T of a run with one full-batch local step."""
    local = mf.LocalSGD(**({"steps": 1, "batch_size": None, "lr": ETA} | options))
    models = [np.zeros(5)]
    for t in range(len(schedule)):
        run = mf.simulate(**quadratic, algorithm=algorithm, availability=mf.availability.Explicit(schedule[: t + 1]), local=local)
        models.append(run.params.numpy())
    return models


def test_objective_is_the_mean_over_clients(quadratic):
    """min f(w) = 1/N sum f_i(w): with equal clients the known optimum makes the mean gradient vanish."""
    data, split = quadratic["data"], quadratic["split"]
    mean = np.mean([gradient(data, part, data.optimum.numpy()) for part in split], axis=0)
    np.testing.assert_allclose(mean, 0, atol=1e-12)


def test_local_sgd_and_local_update(quadratic):
    """w_{k+1} = w_k - eta_L grad F_i(w_k; xi_k), and g_i = (1/K) sum of those gradients."""
    data, split = quadratic["data"], as_split(quadratic["split"], 72)
    local = mf.LocalSGD(steps=4, batch_size=None, lr=ETA)
    clients = Clients(data, split, torch.device("cpu"), torch.float64)
    engine = PlainEngine(quadratic["model"], clients, mse)
    w = torch.zeros(5, dtype=torch.float64)
    [updates] = engine.train([request_of(clients, local, 0, 0, w, {}, np.array([2]), mf.Instructions(), ETA, ETA)])
    w, total = np.zeros(5), np.zeros(5)
    for _ in range(4):
        g = gradient(data, split[2], w)
        total += g
        w = w - ETA * g
    np.testing.assert_allclose(updates.g[0].numpy(), total, rtol=1e-12)
    np.testing.assert_allclose(engine.work.w.numpy(), w, rtol=1e-12)
    assert updates.K.tolist() == [4]


@pytest.mark.parametrize("update", ["sum", "mean"])
def test_global_update(quadratic, update):
    """v_t = 1/|S_t| sum g_i and w_{t+1} = w_t - eta_t v_t; `mean` divides g_i by K, `sum` does not."""
    data, split = quadratic["data"], quadratic["split"]
    schedule = np.array([[1, 0, 1, 0, 0, 1]], bool)
    history = mf.simulate(
        **quadratic,
        algorithm="fedavg",
        availability=mf.availability.Explicit(schedule),
        local=mf.LocalSGD(steps=2, batch_size=None, lr=ETA),
        global_lr=0.7,
        update=update,
    )
    g = []
    for i in (0, 2, 5):
        first = gradient(data, split[i], np.zeros(5))
        g.append((first + gradient(data, split[i], -ETA * first)) / (2 if update == "mean" else 1))
    np.testing.assert_allclose(history.params.numpy(), -0.7 * np.mean(g, axis=0), rtol=1e-12)


def test_sum_with_the_local_rate_is_model_averaging(quadratic):
    """FedAvg as McMahan et al. wrote it: the new model is the mean of the clients' models."""
    data, split = quadratic["data"], quadratic["split"]
    history = mf.simulate(**quadratic, algorithm="fedavg", rounds=1, local=mf.LocalSGD(steps=3, batch_size=None, lr=ETA))
    ends = []
    for part in split:
        w = np.zeros(5)
        for _ in range(3):
            w = w - ETA * gradient(data, part, w)
        ends.append(w)
    np.testing.assert_allclose(history.params.numpy(), np.mean(ends, axis=0), rtol=1e-11)


def test_correction_variable(quadratic):
    """c_i = v_t - g_i for active clients, unchanged for the others."""
    algorithm = mf.MimiC()
    state = algorithm.init(torch.zeros(3, dtype=torch.float64), 4)
    state.c[:] = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    old, active = state.c[:], torch.tensor([1, 2])
    g = torch.randn(2, 3, dtype=torch.float64)
    half = torch.full((2,), 0.5, dtype=torch.float64)
    algorithm.aggregate(state, active, g, mf.Step(0, ETA, ETA, torch.ones(2), half, half))
    v = (g + old[active]).mean(0)
    torch.testing.assert_close(state.c[active], v - g)
    torch.testing.assert_close(state.w, -ETA * v)
    assert torch.equal(state.c[[0, 3]], old[[0, 3]])


def test_global_update_of_mimic_in_both_forms(quadratic):
    """v_t = 1/|S_t| sum of g_i(w_t) - g_i(w_{t-tau}) + v_{t-tau}, with tau from the schedule."""
    data, split = quadratic["data"], quadratic["split"]
    schedule = random_schedule(12, 6, seed=4)
    schedule[6] = True  # no empty round: every v_t exists
    w = path(quadratic, "mimic", schedule)
    v = [(w[t] - w[t + 1]) / ETA for t in range(12)]
    for t in range(1, 12):
        parts = []
        for i in np.flatnonzero(schedule[t]):
            before = max(s for s in range(t) if schedule[s, i])
            parts.append(gradient(data, split[i], w[t]) - gradient(data, split[i], w[before]) + v[before])
        np.testing.assert_allclose(v[t], np.mean(parts, axis=0), rtol=1e-8, atol=1e-9)


def test_corrected_update_is_the_central_update_plus_two_errors(quadratic):
    """v_t^i = grad f(w_t) + A_1 + A_2 with A_1 = v_{t'} - grad f(w_{t'}) and A_2 = Delta_{-i}(w_{t'}) - Delta_{-i}(w_t).

    The left side is g_i + c_i from the state of the algorithm; the right side is computed from the data.
    """
    data, split = quadratic["data"], quadratic["split"]
    schedule = random_schedule(10, 6, seed=8)
    schedule[5] = True
    algorithm, w = mf.MimiC(), torch.zeros(5, dtype=torch.float64)
    state = algorithm.init(w, 6)
    models, directions, last = [], [], {}

    def central(at):
        return np.mean([gradient(data, part, at) for part in split], axis=0)

    checked = 0
    for t, row in enumerate(schedule):
        active = np.flatnonzero(row)
        at = state.w.numpy().copy()
        g = torch.from_numpy(np.stack([gradient(data, split[i], at) for i in active]))
        for k, i in enumerate(active):
            corrected = (g[k] + state.c[i]).numpy()
            if i in last:
                then = models[last[i]]
                a1 = directions[last[i]] - central(then)
                a2 = (central(then) - gradient(data, split[i], then)) - (central(at) - gradient(data, split[i], at))
                np.testing.assert_allclose(corrected, central(at) + a1 + a2, rtol=1e-9, atol=1e-10)
                checked += 1
            last[i] = t
        m = len(active)
        weights = torch.full((m,), 1 / m, dtype=torch.float64)
        models.append(at)
        algorithm.aggregate(state, torch.from_numpy(active), g, mf.Step(t, ETA, ETA, torch.ones(m), weights, weights))
        directions.append((at - state.w.numpy()) / ETA)
    np.testing.assert_allclose(directions[0], central(models[0]), rtol=1e-10)  # all clients are active in round 0: exact
    assert checked > 10


def test_learning_rates_of_table_two():
    """eta_t = 0.01 * 0.95^(t-1) with t from 1 is geometric(0.01, 0.95) with t from 0."""
    rate = mf.lr.geometric(0.01, 0.95)
    assert [rate(t) for t in range(3)] == pytest.approx([0.01, 0.0095, 0.009025])
    assert mf.lr.theory(2.0, 5.0)(3, 4) == pytest.approx(2 * 4 / 8)


def test_samples_per_client_of_table_two():
    """2,000 samples per client for Fashion-MNIST (60,000) and 1,666 for CIFAR-10 (50,000)."""
    for per_class, expected in ((6000, 2000), (5000, 1666)):
        split = mf.partition.shards(np.repeat(np.arange(10), per_class), 30, 2, seed=0)
        assert {len(part) for part in split} == {expected}
