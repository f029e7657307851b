"""The mixing certificate holds on random quadratics, is nearly tight, and none of its terms can be omitted."""

import numpy as np
import pytest

from mimicfl import UsageError
from mimicfl.theory import bounds, mixing
from mimicfl.theory.rates import varphi
from mimicfl.theory.rounds import Rounds
from tests.theory.problems import Quadratic, availability, loop, quadratic

T = 24


def instance(seed):
    rng = np.random.default_rng(seed)
    problem = quadratic(rng)
    available = availability(rng, T, problem.N)
    K = int(rng.choice([1, 1, 4]))
    eta_L = rng.uniform(0.2, 1) * bounds.local_limit(problem.L, K) if K > 1 else 0.0
    return rng, problem, available, {"K": K, "eta_L": eta_L}


@pytest.mark.slow
def test_bound_holds_for_every_horizon_with_constant_and_varying_rates():
    tightest = []
    for seed in range(100):
        rng, problem, available, work = instance(seed)
        constant = mixing.largest_constant(Rounds(np.ones(T), available), problem.L, **work)
        for eta in (np.full(T, constant), constant * rng.uniform(0.1, 1, size=T)):  # rates may also increase and decrease
            rounds = Rounds(eta, available)
            w0 = 3 * rng.normal(size=problem.b.shape[1])
            m = loop(problem, available, eta, w0, "mimic", **work)
            Delta = float(problem.f(w0) - problem.f(problem.optimum))
            bound = mixing.mixing_bound(rounds, Delta, problem.L, m["drift"], **work)
            assert np.isfinite(bound).all(), seed
            measured = bounds.weighted_mean(rounds.eta, m["grad2"])
            assert np.all(measured <= bound * (1 + 1e-9)), seed
            tightest.append((measured / bound).max())
    assert max(tightest) > 0.5


def parts(rounds):
    """Return M and its two terms: for memories, and for inactive clients."""
    M = mixing.mixing(rounds)
    memory = mixing._memories(rounds.active) @ counts(rounds) / np.sqrt(rounds.m)[:, None]
    return M, memory, M - memory


@pytest.mark.slow
def test_error_bound_holds_in_every_round_and_needs_the_memory_term():
    broken = 0
    for seed in range(60):
        rng, problem, available, _ = instance(seed)
        eta = np.full(T, 0.5 / problem.L)
        rounds = Rounds(eta, available)
        m = loop(problem, available, eta, 3 * rng.normal(size=problem.b.shape[1]), "mimic")
        M, _, unseen = parts(rounds)
        error, z = np.sqrt(m["E"]), rounds.eta * np.sqrt(m["v2"])
        assert np.all(error <= problem.L * (M @ z) * (1 + 1e-9) + 1e-12), seed
        broken += bool(np.any(error > problem.L * (unseen @ z) + 1e-9))
    assert broken > 30


def test_error_bound_needs_the_term_for_inactive_clients():
    """Only one client, with negative curvature, is active: its memory and the gradients of the others change in opposite directions."""
    problem = Quadratic(np.array([[[-1.0]]] + 9 * [[[1.0]]]), np.zeros((10, 1)))
    available = np.zeros((6, 10), dtype=bool)
    available[:, 0] = available[0] = True
    eta = np.full(6, 0.05)
    rounds = Rounds(eta, available)
    m = loop(problem, available, eta, np.ones(1), "mimic")
    M, memory, _ = parts(rounds)
    error, z = np.sqrt(m["E"]), rounds.eta * np.sqrt(m["v2"])
    assert np.all(error <= M @ z * (1 + 1e-9) + 1e-12)
    assert np.all(error[1:] > 1.5 * (memory @ z)[1:])


def counts(rounds):
    """Return n_sr^(1/2), computed by counting."""
    n = np.zeros((rounds.T, rounds.T))
    for s in range(rounds.T):
        for i in np.flatnonzero(rounds.active[s]):
            before = np.flatnonzero(rounds.active[:s, i])
            if len(before):
                n[s, before[-1] : s] += 1
    return np.sqrt(n)


@pytest.mark.parametrize("N", [5, 45])
def test_memories_are_the_norms_of_the_products(N):
    """With many clients, norms of earlier rounds are reused, which are upper bounds."""
    rng = np.random.default_rng(0)
    available = availability(rng, 25, N, p=0.5)
    available = available[available.any(axis=1)]
    pi = mixing._memories(available)
    for s in range(0, len(available), 4):
        product = np.eye(N) - 1 / N
        for t in range(s, len(available)):
            P = np.eye(N)
            P[np.ix_(available[t], available[t])] = 1 / available[t].sum()
            product = P @ product
            true = np.linalg.norm(product, 2)
            assert true - 1e-9 <= pi[t, s]
            assert pi[t, s] <= true + mixing.FADED or N > 20
    assert pi[-1, 0] < 0.1


def test_certified_rate_is_constant_if_clients_mix_and_vanishes_otherwise():
    def limits(together):
        found = []
        for T in (100, 400):
            available = np.zeros((T, 2), dtype=bool)
            available[:, 0], available[::6] = True, [False, True]
            available[0] = True
            if together:
                available[::30] = True
            found.append(mixing.largest_constant(Rounds(np.ones(T), available), 1.0))
            assert len(Rounds(np.ones(T), available).groups) == 1 + (not together)
        return found

    lasting, vanishing = limits(True), limits(False)
    assert lasting[1] == pytest.approx(lasting[0], rel=1e-6)
    assert vanishing[1] < 0.3 * vanishing[0]  # decreases like 1/T, so no constant rate works for all horizons


@pytest.mark.slow
def test_bound_decreases_to_zero_with_the_horizon():
    rng = np.random.default_rng(2)
    problem = quadratic(rng, N=4, d=2)
    w0 = problem.optimum + 2.0
    Delta = float(problem.f(w0) - problem.f(problem.optimum))
    last = []
    for T in (50, 800):
        available = availability(np.random.default_rng(1), T, 4, p=0.6)
        eta = np.full(T, mixing.largest_constant(Rounds(np.ones(T), available), problem.L))
        rounds = Rounds(eta, available)
        measured = bounds.weighted_mean(rounds.eta, loop(problem, available, eta, w0, "mimic")["grad2"])[-1]
        last.append(mixing.mixing_bound(rounds, Delta, problem.L)[-1])
        assert measured <= last[-1]
    assert last[1] < last[0] / 8


def test_certified_rounds():
    rng = np.random.default_rng(3)
    available = availability(rng, 40, 4, p=0.4)
    constant = mixing.largest_constant(Rounds(np.ones(40), available).head(20), 1.0)
    rounds = Rounds(np.full(40, constant * (1 - 1e-9)), available)
    assert 20 <= mixing.certified_rounds(rounds, 1.0) < rounds.T
    assert mixing.certified_rounds(Rounds(np.full(40, 2.0), available), 1.0) == 0
    l2 = varphi(1.0, 3, 0.05) - 1
    assert mixing.room(rounds, 1.0, 3, 0.05) == pytest.approx(1 - constant - 2 * l2 * mixing.strength(rounds) ** 2)


def test_unsupported_schedules_raise_usage_error():
    with pytest.raises(UsageError, match="warm_start=true"):
        mixing.mixing(Rounds(np.ones(2), np.array([[1, 0], [1, 1]], dtype=bool)))
    with pytest.raises(UsageError, match="500 rounds of 1000 clients are too many"):
        mixing.mixing(Rounds(np.ones(500), np.ones((500, 1000), dtype=bool)))
    rounds = Rounds(np.full(3, 5.0), np.ones((3, 2), dtype=bool))
    assert np.isinf(mixing.mixing_bound(rounds, 1.0, 1.0)).all()
