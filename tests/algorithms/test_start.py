"""Start points: an algorithm may have each client start somewhere else than at the global model."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl.algorithms.client_memory import ClientMemory
from tests.algorithms import reference
from tests.algorithms.test_reference import naive_problem
from tests.conftest import end_on, random_schedule

ROUNDS = 12


@dataclass
class Offsets(mf.State):
    x: ClientMemory  # [N, d] how far each client's last local model lies from the global model it started near


class HalfwayBack(mf.Algorithm):
    """Each client starts halfway between the global model and where its last local training ended."""

    def init(self, w, num_clients):
        return Offsets(w, ClientMemory(w, num_clients))

    def instructions(self, state, active):
        return mf.Instructions(mu=0.2, start=state.w + state.x[active] / 2)

    def aggregate(self, state, active, g, step):
        state.x[active] = state.x[active] / 2 - step.change(g)
        state.w = state.w - step.eta * step.mean(g)


def naive(problem, schedule, rate, decay, update):
    w, x = np.zeros(problem[0][0].shape[1]), {}
    for t, row in enumerate(schedule):
        updates = []
        for i in np.flatnonzero(row):
            start = w + x.get(i, 0.0) / 2
            features, y, batches = problem[i]
            taken, _ = reference.local_train(start, features, y, batches(t), rate, mu=0.2, decay=decay)
            x[i] = start - rate * sum(taken) - w
            updates.append(sum(taken) / (len(taken) if update == "mean" else 1))
        if updates:
            w = w - 0.04 * np.mean(updates, axis=0)
    return w


@pytest.mark.slow
@pytest.mark.parametrize("update", ["sum", "mean"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_equals_the_naive_loop(quadratic, decay, update):
    schedule, local = random_schedule(ROUNDS, 6, seed=3), mf.LocalSGD(epochs=2, batch_size=5, lr=0.05, weight_decay=decay)
    given = {
        "availability": mf.availability.Explicit(schedule),
        "rounds": ROUNDS,
        "local": local,
        "global_lr": 0.04,
        "seed": 7,
        "update": update,
    }
    found = mf.simulate(**quadratic, algorithm=HalfwayBack(), **given).params.numpy()
    wanted = naive(naive_problem(quadratic["data"], quadratic["split"], local, seed=7), schedule, 0.05, decay, update)
    from_w = mf.simulate(**quadratic, algorithm=mf.FedProx(mu=0.2), **given).params.numpy()
    assert np.abs(wanted - from_w).max() > 1e-3  # the start matters here
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "workers", "batched"])
def test_every_engine_starts_there(digits, engine):
    given = {**digits, "algorithm": HalfwayBack(), "availability": "static:0.3", "rounds": 3, "local": mf.LocalSGD(steps=3, lr=0.05)}
    torch.testing.assert_close(end_on(engine, **given), end_on("plain", **given), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:the model has BatchNorm")
def test_buffers_are_averaged_over_all_clients(quadratic):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1, bias=False)).double()
    given = {**quadratic, "model": model, "rounds": 2, "local": mf.LocalSGD(steps=1, batch_size=None, lr=1e-9)}
    starts, plain = (mf.simulate(**given, algorithm=algorithm).buffers for algorithm in (HalfwayBack(), "fedavg"))
    for name, value in plain.items():
        torch.testing.assert_close(starts[name], value)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (lambda state, active: 0.0, "start must be a tensor"),
        (lambda state, active: state.x, r"memory\[active\]"),
        (lambda state, active: state.x[:], "one row per active client"),
        (lambda state, active: state.w.float(), "float64"),
    ],
)
def test_wrong_starts_are_refused(quadratic, start, words):
    class Wrong(HalfwayBack):
        def instructions(self, state, active):
            return mf.Instructions(start=start(state, active))

    with pytest.raises(mf.UsageError, match=words):
        mf.simulate(**quadratic, algorithm=Wrong(), availability=mf.availability.Explicit(np.eye(6, dtype=bool)), rounds=2)
