"""FedAWE, FedStale, amplified FedAvg and SCAFFOLD, FedGain and FedSteer equal their naive loops, in float64, under dropouts."""

import numpy as np
import pytest
import torch

import mimicfl as mf
from tests.algorithms import reference_rivals as naive
from tests.algorithms.test_reference import naive_problem
from tests.conftest import random_schedule

ROUNDS = 25
CASES = {
    "fedstale": (mf.FedStale(0.3), lambda f: naive.fedstale(f, 0.3)),
    "fedstale-cut": (mf.FedStale(0.7, cutoff=3), lambda f: naive.fedstale(f, 0.7, cutoff=3)),
    "fedstale-known": (mf.FedStale(0.3, "known"), lambda f: naive.fedstale(f, 0.3, f.schedule.mean(axis=0))),
    "known-p": (mf.KnownP(), lambda f: naive.known_p(f, f.schedule.mean(axis=0))),
    "fedawe": (mf.FedAWE(), naive.fedawe),
    "fedawe-authors": (mf.FedAWE(clip=0.05, evaluate="mean"), lambda f: naive.fedawe(f, 0.05, "mean")),
    "amplified-fedavg": (mf.AmplifiedFedAvg(4, 1.5), lambda f: naive.amplified(f, 4, 1.5, controls=False)),
    "amplified-scaffold": (mf.AmplifiedSCAFFOLD(4, 1.5), lambda f: naive.amplified(f, 4, 1.5, controls=True)),
    "focus": (mf.FOCUS(), naive.focus),
    "fedgain": (mf.FedGain(0.6), lambda f: naive.fedgain(f, 0.6)),
    "fedgain-innovations": (mf.FedGain(0.6, "innovations"), lambda f: naive.fedgain(f, 0.6, "innovations")),
    "fedsteer": (mf.FedSteer(), lambda f: naive.fedsteer(f, 1.0)),
    "fedsteer-half": (mf.FedSteer(0.5), lambda f: naive.fedsteer(f, 0.5)),
    "fedsteer-zero": (mf.FedSteer(0.3, never_seen="zero"), lambda f: naive.fedsteer(f, 0.3, never_seen="zero")),
    "fedsteer-direction": (mf.FedSteer(0.6, "direction"), lambda f: naive.fedsteer_direction(f, 0.6)),
    "fedsteer-direction-one": (mf.FedSteer(1, "direction"), lambda f: naive.fedsteer_direction(f, 1.0)),
    "fedsteer-horizon": (mf.FedSteer(horizon=4), lambda f: naive.fedsteer(f, 1.0, horizon=4)),
    "fedsteer-direction-horizon": (mf.FedSteer(0.6, "direction", horizon=4), lambda f: naive.fedsteer_direction(f, 0.6, horizon=4)),
}
SETTINGS = [
    ("sum", "uniform", {"epochs": 2, "batch_size": 5}),
    ("mean", "samples", {"epochs": 2, "batch_size": 5}),
    ("mean", "uniform", {"epochs": 2, "batch_size": 5, "momentum": 0.7, "weight_decay": 0.1}),
]


def both(quadratic, algorithm, loop, update, weighting, local, warm=False, **more):
    """The end of a run, and of the loop on the same problem."""
    split = [part[: 4 + i] for i, part in enumerate(quadratic["split"])]  # unequal clients
    schedule = random_schedule(ROUNDS, len(split), seed=3)
    if not warm:
        schedule[:4, 2] = False
    work = mf.LocalSGD(**local, lr=mf.lr.geometric(0.05, 0.97))
    rates = {"local": work, "global_lr": mf.lr.geometric(0.04, 0.98), "update": update, "weighting": weighting, "seed": 7}
    given = {**quadratic, "split": split, "availability": mf.availability.Explicit(schedule), "rounds": ROUNDS}
    history = mf.simulate(**given, algorithm=algorithm, **rates, **more)
    federation = naive.Federation(
        naive_problem(quadratic["data"], split, work, seed=7),
        schedule,
        lambda t: 0.05 * 0.97**t,
        lambda t: 0.04 * 0.98**t,
        update,
        [len(part) for part in split] if weighting == "samples" else None,
        local.get("weight_decay", 0.0),
        local.get("momentum", 0.0),
    )
    return history.params.numpy(), loop(federation)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("update", "weighting", "local"), SETTINGS)
@pytest.mark.parametrize("warm", [True, False])
def test_equals_the_naive_loop(quadratic, case, update, weighting, local, warm):
    if case == "focus":
        local = {**local, "momentum": 0.0}  # of the published method
    found, wanted = both(quadratic, *CASES[case], update, weighting, local, warm)
    assert np.linalg.norm(wanted) > 0.1  # it moved, so equality says something
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("member", "same"),
    [
        (mf.FedGain(1), "mimic"),
        (mf.FedGain(0), "mifa:never_seen=exclude"),
        (mf.FedGain(1, "innovations"), "fedvarp"),
        (mf.FedGain(0, "innovations"), "mifa"),
        (mf.FedStale(0.0), "fedau"),
        (mf.AmplifiedFedAvg(3, 1.0), "fedavg"),
    ],
    ids=lambda x: str(x),
)
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_special_cases(quadratic, member, same, weighting):
    split = [part[: 4 + i] for i, part in enumerate(quadratic["split"])]
    schedule = random_schedule(40, 6, seed=5, p=0.3)
    schedule[0] = [1, 0, 1, 0, 0, 0]
    schedule[:15, 5] = False  # seen late
    given = {**quadratic, "split": split, "availability": mf.availability.Explicit(schedule), "weighting": weighting}
    local = mf.LocalSGD(epochs=1, batch_size=4, lr=mf.lr.geometric(0.05, 0.97))
    ends = [mf.simulate(**given, algorithm=algorithm, local=local).params for algorithm in (member, same)]
    assert ends[0].norm() > 0.1
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize(
    ("member", "same", "steps"),
    [
        (mf.FedSteer(never_seen="zero"), "scaffold", 3),
        (mf.FedSteer(never_seen="zero"), "fedvarp", 1),
        (mf.FedSteer(0, never_seen="zero"), "mifa", 1),
        (mf.FedSteer(0), "mifa:never_seen=exclude", 1),
        (mf.FedSteer(0.6, never_seen="zero"), "fedgain:gain=0.6,follow=innovations", 1),
        (mf.FedSteer(0.6, "direction"), "fedgain:gain=0.6", 1),
        (mf.FedSteer(1, "direction"), "mimic", 1),
        (mf.FedSteer(horizon=3, never_seen="zero"), "fedvarp", 1),
        (mf.FedSteer(0, horizon=3), "mifa:never_seen=exclude", 1),
        (mf.FedSteer(0.6, "direction", horizon=3), "fedgain:gain=0.6", 1),
        (mf.FedSteer(horizon=1e18, never_seen="zero"), "scaffold", 3),
    ],
    ids=lambda x: str(x),
)
def test_special_cases_of_fedsteer(quadratic, member, same, steps, weighting):
    """With one local step the shift cancels, and the other members of FedGain's family follow."""
    split = [part[: 4 + i] for i, part in enumerate(quadratic["split"])]
    schedule = random_schedule(40, 6, seed=5, p=0.3)
    schedule[0] = [1, 0, 1, 0, 0, 0]
    schedule[:15, 5] = False  # seen late
    given = {**quadratic, "split": split, "availability": mf.availability.Explicit(schedule), "weighting": weighting}
    local = mf.LocalSGD(steps=steps, batch_size=4, lr=mf.lr.geometric(0.05, 0.97))
    ends = [mf.simulate(**given, algorithm=algorithm, local=local).params for algorithm in (member, same)]
    assert ends[0].norm() > 0.1
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


def test_fedgain_needs_only_a_sum(quadratic):
    """The client form: clients keep c_i, the server sees the sum of g_i + c_i and how many of them are new, and sends v_t back."""
    n, d, gain = 6, 4, 0.6
    rng = np.random.default_rng(0)
    algorithm = mf.FedGain(gain)
    state = algorithm.init(torch.zeros(d, dtype=torch.float64), n)
    held, v, w, k_sum = {}, np.zeros(d), np.zeros(d), float(n)
    for t, row in enumerate(random_schedule(30, n, seed=2, p=0.3)):
        active = np.flatnonzero(row)
        if not len(active):
            continue
        g = {i: rng.normal(size=d) for i in active}
        total = sum(g[i] + held.get(i, 0.0) for i in active)  # what secure aggregation gives the server
        new = sum(i not in held for i in active)
        v = ((n - k_sum) * v + total) / (n - k_sum + new + gain * (len(active) - new))
        k_sum -= new * (1 - gain)
        w = w - 0.1 * v
        held |= {i: gain * v - g[i] for i in active}
        rows = torch.from_numpy(active)
        m = torch.full((len(active),), 1.0, dtype=torch.float64)
        algorithm.aggregate(state, rows, torch.from_numpy(np.stack([g[i] for i in active])), mf.Step(t, 0.1, 0.1, m, m / m.sum(), m / n))
    np.testing.assert_allclose(state.w.numpy(), w, rtol=1e-11)


def test_amplified_scaffold_keeps_c_the_mean_of_all_controls():
    n, d = 5, 4
    algorithm = mf.AmplifiedSCAFFOLD(3, 1.5)
    state = algorithm.init(torch.zeros(d, dtype=torch.float64), n)
    share = torch.from_numpy(np.arange(1, n + 1) / np.arange(1, n + 1).sum())
    rng = np.random.default_rng(1)
    for t, row in enumerate(random_schedule(30, n, seed=2)):
        active = torch.from_numpy(np.flatnonzero(row))
        if len(active):
            own, steps = share[active], torch.full((len(active),), 4)
            g = torch.from_numpy(rng.normal(size=(len(active), d)))
            algorithm.aggregate(state, active, g, mf.Step(t, 0.1, 0.1, steps, own / own.sum(), own))
            torch.testing.assert_close(state.c, share @ state.c_i[:], rtol=1e-12, atol=1e-13)
    assert state.c.norm() > 0


def test_fedawe_repeats_an_update_for_every_round_missed():
    algorithm = mf.FedAWE()
    state = algorithm.init(torch.zeros(2, dtype=torch.float64), 3)
    one, g = torch.ones(1, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    for t, step in ((0, 1.0), (5, 5.0), (7, 2.0)):
        before = state.w
        algorithm.aggregate(state, torch.tensor([1]), g, mf.Step(t, 0.1, 0.1, one, one, one / 3))
        torch.testing.assert_close(before - state.w, torch.full((2,), 0.1 * step, dtype=torch.float64))


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: mf.FedGain(1.1), "gain"),
        (lambda: mf.FedGain(0.5, "nobody"), "follow"),
        (lambda: mf.FedSteer(never_seen="none"), "never_seen"),
        (lambda: mf.FedSteer(gain=-1), "gain"),
        (lambda: mf.FedSteer(horizon=-1), "horizon"),
        (lambda: mf.FedStale(-0.1), "beta"),
        (lambda: mf.FedStale(0.5, "guessed"), "estimated"),
        (lambda: mf.FedAWE(clip=-1), "clip"),
        (lambda: mf.FedAWE(evaluate="best"), "evaluate"),
        (lambda: mf.AmplifiedFedAvg(0), "period"),
        (lambda: mf.AmplifiedSCAFFOLD(5, 0.5), "gamma"),
    ],
)
def test_bad_options_are_refused(make_it, words):
    with pytest.raises(mf.UsageError, match=words):
        make_it()
