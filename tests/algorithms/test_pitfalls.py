"""Slips seen in public implementations, made on purpose: the check named in docs/pitfalls.md catches each of them."""

import numpy as np
import pytest
import torch

import mimicfl as mf
from tests.conftest import random_schedule

N, D = 5, 4


def rounds(algorithm, schedule, g, each=lambda state, active: None):
    """Aggregate the updates g [N, D], the same in every round; `each` sees the state after a round."""
    state = algorithm.init(torch.ones(D, dtype=torch.float64), N)
    for t, row in enumerate(schedule):
        active = torch.from_numpy(np.flatnonzero(row))
        if len(active):
            m = torch.ones(len(active), dtype=torch.float64)
            algorithm.aggregate(state, active, g[active], mf.Step(t, 0.1, 0.1, 3 * m, m / m.sum(), m / N))
            each(state, active)
    return state


class WithoutShare(mf.SCAFFOLD):
    """c follows the mean change of the active clients, without |S|/N."""

    def aggregate(self, state, active, g, step):
        before = state.c_i[active]
        c = state.c
        super().aggregate(state, active, g, step)
        state.c = c + step.weights @ (state.c_i[active] - before)


class FromWeights(mf.SCAFFOLD):
    """A client's control starts at the model's weights."""

    def init(self, w, num_clients):
        state = super().init(w, num_clients)
        state.c_i[torch.arange(num_clients)] = w.expand(num_clients, -1)
        return state


class PerSlot(mf.SCAFFOLD):
    """Controls belong to a position among the active clients."""

    def aggregate(self, state, active, g, step):
        super().aggregate(state, torch.arange(len(active)), g, step)


class NotWrittenBack(mf.SCAFFOLD):
    def aggregate(self, state, active, g, step):
        before = state.c_i[active]
        super().aggregate(state, active, g, step)
        state.c_i[active] = before


def distance_from_the_mean(algorithm):
    """The largest |c - mean of all c_i| in a run; SCAFFOLD keeps it at zero."""
    found = []
    g = torch.from_numpy(np.random.default_rng(0).normal(size=(N, D)))
    rounds(algorithm, random_schedule(20, N, seed=2), g, lambda state, active: found.append((state.c - state.c_i[:].mean(0)).norm()))
    return float(max(found))


@pytest.mark.parametrize("broken", [WithoutShare(), FromWeights(), NotWrittenBack()], ids=lambda b: type(b).__name__)
def test_the_mean_of_the_controls(broken):
    assert distance_from_the_mean(mf.SCAFFOLD()) < 1e-13
    assert distance_from_the_mean(broken) > 0.1


def test_renumbering():
    """Memory per position survives the mean of the controls, but not a change of the clients' numbers."""
    order = np.array([3, 0, 4, 1, 2])
    schedule = random_schedule(12, N, seed=5)
    g = torch.from_numpy(np.random.default_rng(0).normal(size=(N, D)))
    for algorithm, same in ((mf.SCAFFOLD(), True), (PerSlot(), False)):
        plain = rounds(algorithm, schedule, g).c_i[order]
        renumbered = rounds(algorithm, schedule[:, order], g[order]).c_i[:]
        assert torch.allclose(plain, renumbered, atol=1e-12) is same


class Ascending(mf.MIFA):
    """The stored difference is added with the wrong sign."""

    def aggregate(self, state, active, g, step):
        w = state.w
        super().aggregate(state, active, g, step)
        state.w = 2 * w - state.w


def test_a_step_lowers_the_loss(quadratic):
    given = {**quadratic, "rounds": 5, "local": mf.LocalSGD(steps=1, batch_size=None, lr=0.02)}
    begin, right, wrong = (mf.simulate(**given, algorithm=a).rows for a in ("fedavg", mf.MIFA(), Ascending()))
    assert right[-1]["test_loss"] < begin[0]["test_loss"] < wrong[-1]["test_loss"]


class NeverCounted(mf.FedAU):
    """The number of gaps never leaves zero, so the last gap, counted from the start, is taken for their mean."""

    def aggregate(self, state, active, g, step):
        super().aggregate(state, active, g, step)
        state.counted[:], state.since[:] = 0, -1


def test_weights_tend_to_the_inverse_rate():
    """A client that participates in every fourth round has the weight 4, not t."""
    schedule = np.zeros((200, N), bool)
    schedule[3::4, 1] = True
    for algorithm, near in ((mf.FedAU(cutoff=1000), True), (NeverCounted(cutoff=1000), False)):
        state = rounds(algorithm, schedule, torch.ones(N, D, dtype=torch.float64))
        assert (abs(float(state.gap[1]) - 4) < 0.5) is near


class Aliased(mf.FedAvg):
    """The sum starts as a reference to the last client's model and not as zeros: its update counts twice."""

    def aggregate(self, state, active, g, step):
        state.w = state.w - step.eta * (step.mean(g) + g[-1])


def test_equal_updates_move_the_model_by_one_update():
    g = torch.ones(N, D, dtype=torch.float64)
    for algorithm, length in ((mf.FedAvg(), 0.1), (Aliased(), 0.2)):
        state = rounds(algorithm, np.ones((1, N), bool), g)
        torch.testing.assert_close(1 - state.w, torch.full((D,), length, dtype=torch.float64))
