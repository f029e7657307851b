"""Under periodic dropouts on heterogeneous quadratics, methods that remember reach the optimum and FedAvg does not.

This is the test that catches subtly wrong MimiCs: two of them, broken on purpose, are run through it below.
"""

import copy

import numpy as np
import pytest

import mimicfl as mf

pytestmark = pytest.mark.slow

ROUNDS = 500  # all methods are where they stay after half of them


def periodic(clients):
    """Client i participates every i+1 rounds, so the active clients change and some are always rarer than others."""
    return (np.arange(ROUNDS)[:, None] % np.arange(1, clients + 1)) == 0


def distance(quadratic, algorithm, steps=1, **more):
    history = mf.simulate(
        **quadratic,
        algorithm=algorithm,
        availability=mf.availability.Explicit(periodic(len(quadratic["split"]))),
        rounds=ROUNDS,
        local=mf.LocalSGD(steps=steps, batch_size=None, lr=0.02),
        eval_every=ROUNDS,
        **more,
    )
    return history.rows[-1]["distance"]


@pytest.mark.parametrize("algorithm", ["mimic", "mifa", "fedvarp", "scaffold", "fedgain", "fedgain:0.5,innovations", "fedsteer"])
def test_memory_reaches_the_optimum(quadratic, algorithm):
    # SCAFFOLD's server step follows the present clients' steered steps, which at the optimum are all zero.
    assert distance(quadratic, algorithm) < 1e-3


@pytest.mark.parametrize(
    ("algorithm", "reaches"),
    [
        ("fedsteer", True),
        ("fedsteer:gain=0", True),
        ("fedsteer:gain=0.6,follow=direction", True),
        ("fedsteer:horizon=400", False),  # a weaker shift leaves a part of the drift
        ("scaffold", True),
        ("fedgain", False),
        ("mimic", False),
        ("mifa", False),
        ("fedvarp", False),
    ],
)
def test_several_local_steps_drift_unless_they_are_corrected(quadratic, algorithm, reaches):
    """At a constant rate: memory at the server alone ends beside the optimum, whatever its gain."""
    assert (distance(quadratic, algorithm, steps=5) < 1e-3) == reaches


def test_focus_reaches_the_optimum(quadratic):
    """Its step is a sum over the clients, so its rate is a sixth of the others'."""
    assert distance(quadratic, "focus", global_lr=0.02 / 6) < 1e-3


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavgm", "fedprox"])
def test_fedavg_and_fedprox_do_not(quadratic, algorithm):
    assert distance(quadratic, algorithm) > 0.1


def test_fedau_finds_the_optimum_with_a_decaying_rate(quadratic):
    """FedAU swings with who is there, but around the right point: with a falling rate it ends there, FedAvg elsewhere."""
    clients, rounds = len(quadratic["split"]), 3000
    there = np.random.default_rng(4).random((rounds, clients)) < np.linspace(0.1, 0.9, clients)
    local = mf.LocalSGD(steps=1, batch_size=None, lr=lambda t: 0.05 / (1 + 0.01 * t))
    ends = {
        name: mf.simulate(
            **quadratic, algorithm=name, availability=mf.availability.Explicit(there), rounds=rounds, local=local, eval_every=rounds
        ).rows[-1]["distance"]
        for name in ("fedau", "fedavg")
    }
    assert ends["fedau"] < 0.1 < 5 * ends["fedau"] < ends["fedavg"], ends


class MemoryBeforeUse(mf.MimiC):
    """Wrong: c_i is updated before it corrects anything."""

    def aggregate(self, state, active, g, step):
        state.c[active] = step.mean(g) - g
        v = step.mean(g + state.c[active])
        state.w = state.w - step.eta * v
        return state


class MemoryOfPlainMean(mf.MimiC):
    """Wrong: c_i is measured against the mean of g instead of v_t."""

    def aggregate(self, state, active, g, step):
        v = step.mean(g + state.c[active])
        state.c[active] = step.mean(g) - g
        state.w = state.w - step.eta * v
        return state


class ForgetfulScaffold(mf.SCAFFOLD):
    """Wrong: c_i is never written back."""

    def aggregate(self, state, active, g, step):
        before = copy.deepcopy(state.c_i)
        super().aggregate(state, active, g, step)
        state.c_i = before
        return state


@pytest.mark.parametrize("broken", [MemoryBeforeUse(), MemoryOfPlainMean(), ForgetfulScaffold()], ids=lambda b: type(b).__name__)
@pytest.mark.filterwarnings("ignore")
def test_broken_variants_fail_this_check(quadratic, broken):
    try:
        assert distance(quadratic, broken) > 0.05
    except mf.Diverged:
        pass  # blowing up is being caught, too
