"""Every algorithm equals its naive loop, in float64, under dropouts."""

import numpy as np
import pytest

import mimicfl as mf
from mimicfl.seeds import stream
from tests.algorithms import reference
from tests.conftest import random_schedule

ROUNDS = 25
CASES = {
    "fedavg": (mf.FedAvg(), {"name": "fedavg"}),
    "fedprox": (mf.FedProx(mu=0.3), {"name": "fedprox", "mu": 0.3}),
    "scaffold": (mf.SCAFFOLD(), {"name": "scaffold"}),
    "mifa-zero": (mf.MIFA(), {"name": "mifa"}),
    "mifa-exclude": (mf.MIFA("exclude"), {"name": "mifa", "never_seen": "exclude"}),
    "mifa-wait": (mf.MIFA("wait"), {"name": "mifa", "never_seen": "wait"}),
    "mifa-authors": (mf.MIFA(memory="step"), {"name": "mifa", "memory": "step"}),
    "fedvarp": (mf.FedVARP(), {"name": "fedvarp"}),
    "fedau": (mf.FedAU(), {"name": "fedau"}),
    "fedau-cut": (mf.FedAU(cutoff=3), {"name": "fedau", "cutoff": 3}),
    "fedau-cut-at-once": (mf.FedAU(1), {"name": "fedau", "cutoff": 1}),
    "fedavgm": (mf.FedAvgM(), {"name": "fedavgm"}),
    "fedavgm-undamped": (mf.FedAvgM(0.5, damped=False), {"name": "fedavgm", "beta": 0.5, "damped": False}),
    "fedbuff": (
        mf.FedBuff(),
        {"name": "fedavg"},
    ),  # nothing is stale in synchronous rounds; tests/simulation/test_asynchronous.py for others
    "mimic": (mf.MimiC(), {"name": "mimic"}),
    "mimic-authors": (mf.MimiC(memory="step"), {"name": "mimic", "memory": "step"}),
}


def naive_problem(data, split, local, seed):
    x, y = data.x_train.numpy(), data.y_train.numpy()[:, 0]

    def batches_of(i):
        def batches(t):
            sizes = local.batch_sizes(len(split[i]))
            order = local.order(len(split[i]), sizes, stream(seed, "batches", t, i))
            return np.split(order, np.cumsum(sizes)[:-1])

        return batches

    return [(x[part], y[part], batches_of(i)) for i, part in enumerate(split)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("update", "weighting", "local"),
    [
        ("sum", "uniform", {"epochs": 2, "batch_size": 5}),
        ("mean", "samples", {"epochs": 2, "batch_size": 5}),
        ("sum", "samples", {"steps": 3, "batch_size": None}),
        ("mean", "uniform", {"steps": 7, "batch_size": 4}),
        ("sum", "samples", {"epochs": 2, "batch_size": 5, "weight_decay": 0.3}),
        ("mean", "uniform", {"epochs": 2, "batch_size": 5, "momentum": 0.7, "weight_decay": 0.1}),
    ],
)
@pytest.mark.parametrize("warm", [True, False])
def test_equals_the_naive_loop(quadratic, case, update, weighting, local, warm):
    algorithm, facts = CASES[case]
    split = [part[: 4 + i] for i, part in enumerate(quadratic["split"])]  # unequal clients
    schedule = random_schedule(ROUNDS, len(split), seed=3)
    if not warm:
        schedule[:4, 2] = False
    work = mf.LocalSGD(**local, lr=mf.lr.geometric(0.05, 0.97))
    history = mf.simulate(
        **{**quadratic, "split": split},
        algorithm=algorithm,
        availability=mf.availability.Explicit(schedule),
        rounds=ROUNDS,
        local=work,
        global_lr=mf.lr.geometric(0.04, 0.98),
        update=update,
        weighting=weighting,
        seed=7,
    )
    w, *_ = reference.run(
        **facts,
        problem=naive_problem(quadratic["data"], split, work, seed=7),
        schedule=schedule,
        eta_L=lambda t: 0.05 * 0.97**t,
        eta=lambda t: 0.04 * 0.98**t,
        update=update,
        decay=local.get("weight_decay", 0.0),
        momentum=local.get("momentum", 0.0),
        weights=[len(part) for part in split] if weighting == "samples" else None,
    )
    assert np.linalg.norm(w) > 0.1  # it moved, so equality says something
    np.testing.assert_allclose(history.params.numpy(), w, rtol=1e-10, atol=1e-12)
