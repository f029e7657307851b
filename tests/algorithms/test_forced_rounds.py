"""FedAU, FedStale and known-p with a forced first round (`warm_start=true`), against loops that share nothing with the first ones.

These loops know the whole schedule: the weight of a client is computed anew in every round, from its past rounds without the forced one.
"""

import numpy as np
import pytest

import mimicfl as mf
from tests.algorithms.reference import local_train
from tests.algorithms.test_reference import naive_problem
from tests.conftest import random_schedule

ROUNDS, ETA_L, ETA = 30, 0.05, 0.04


def mean_gap(past, cutoff):
    """The mean length of the pieces into which participation and cuts divide the past; 1 if there is none."""
    pieces, length = [], 0
    for participated in past:
        length += 1
        if participated or length == cutoff:
            pieces.append(length)
            length = 0
    return sum(pieces) / len(pieces) if pieces else 1.0


def weights_of(kind, schedule, t, cutoff):
    """What multiplies share_i g_i: 1 in the forced round, then an estimate of 1 / p_i, or its true value."""
    if t == 0:
        return np.ones(schedule.shape[1])
    if kind == "known":
        return 1 / schedule.mean(axis=0)
    if kind == "counted":  # known-p with participation_rates="estimated": the share of the rounds 1 to t
        return t / schedule[1 : t + 1].sum(axis=0).clip(min=1)
    return np.array([mean_gap(schedule[1:t, i], cutoff) for i in range(schedule.shape[1])])


def loop(problem, schedule, share, kind, beta=0.0, cutoff=50):
    """w_{t+1} = w_t - eta (sum over S of share_i a_i (g_i - beta y_i) + beta sum over N of share_j y_j)."""
    n, d = schedule.shape[1], problem[0][0].shape[1]
    w, y = np.zeros(d), np.zeros((n, d))
    for t in range(len(schedule)):
        there = range(n) if t == 0 else np.flatnonzero(schedule[t])
        if not len(there):
            continue
        a = weights_of(kind, schedule, t, cutoff)
        new = {i: sum(local_train(w, *problem[i][:2], problem[i][2](t), ETA_L)[0]) for i in there}
        v = beta * share @ y + sum(share[i] * a[i] * (new[i] - beta * y[i]) for i in there)
        for i, g in new.items():
            y[i] = g
        w = w - ETA * v
    return w


CASES = {
    "fedau": (mf.FedAU(), {}, {"kind": "gaps"}),
    "fedau-cut": (mf.FedAU(3), {}, {"kind": "gaps", "cutoff": 3}),
    "fedstale": (mf.FedStale(0.4), {}, {"kind": "gaps", "beta": 0.4}),
    "fedstale-cut": (mf.FedStale(1.0, cutoff=2), {}, {"kind": "gaps", "beta": 1.0, "cutoff": 2}),
    "fedstale-known": (mf.FedStale(0.4, "known"), {}, {"kind": "known", "beta": 0.4}),
    "known-p": (mf.KnownP(), {}, {"kind": "known"}),
    "known-p-estimated": (mf.KnownP(), {"participation_rates": "estimated"}, {"kind": "counted"}),
}


def both(quadratic, case, weighting="uniform", forced=True):
    """The end of a run, and of the loop with a forced first round."""
    algorithm, more, facts = CASES[case]
    split = [part[: 4 + i] for i, part in enumerate(quadratic["split"])]
    schedule = random_schedule(ROUNDS, len(split), seed=8, p=0.3)
    schedule[0] = [0, 1, 0, 0, 1, 0]  # what the pattern says of round 0 must not matter, except to the true rates
    schedule[:12, 3] = False  # seen only because it is forced, for a long time
    local = mf.LocalSGD(epochs=2, batch_size=5, lr=ETA_L)
    share = np.array([len(part) for part in split]) if weighting == "samples" else np.ones(len(split))
    wanted = loop(naive_problem(quadratic["data"], split, local, seed=7), schedule, share / share.sum(), **facts)
    if not forced:
        schedule[0] = True
    given = {**quadratic, "split": split, "availability": mf.availability.Explicit(schedule, warm_start=forced), "rounds": ROUNDS}
    found = mf.simulate(**given, algorithm=algorithm, local=local, global_lr=ETA, weighting=weighting, seed=7, **more).params.numpy()
    return found, wanted


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("case", CASES)
def test_a_forced_first_round_equals_the_second_loop(quadratic, case, weighting):
    found, wanted = both(quadratic, case, weighting)
    assert np.linalg.norm(wanted) > 0.1
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_a_round_with_all_clients_that_is_not_forced_gives_another_model(quadratic, case):
    found, wanted = both(quadratic, case, forced=False)
    assert np.linalg.norm(found - wanted) > 1e-3
