"""Any gain between MIFA and MimiC: the bound, the contraction of errors, and where each end must fail. Naive loops in float64."""

import itertools

import numpy as np
import pytest
import torch

import mimicfl as mf


def random_problem(rng, n, d):
    """Quadratics f_i(w) = (w - a_i)' H_i (w - a_i) / 2, some concave in some directions, whose mean is convex; and their L."""
    H = [(lambda q: q @ np.diag(rng.uniform(-0.3, 1.0, d)) @ q.T)(np.linalg.qr(rng.normal(size=(d, d)))[0]) for _ in range(n)]
    H = [h - min(0.0, np.linalg.eigvalsh(np.mean(H, axis=0))[0] - 0.05) * np.eye(d) for h in H]
    return H, rng.normal(size=(n, d)), max(np.abs(np.linalg.eigvalsh(h)).max() for h in H)


def random_schedule(rng, rounds, n, p):
    available = rng.random((rounds, n)) < p
    available[0] = True
    available[np.arange(rounds), rng.integers(0, n, rounds)] = True  # no empty rounds
    return available


def longest_gap(available):
    rounds = len(available)
    return max(int(np.diff(np.append(np.flatnonzero(column), rounds)).max()) for column in available.T)


def run(H, a, available, eta, gains, w):
    """v_t = mean_N y + gamma_t mean_S d with gamma_t = s + gain (1 - s); returns |grad f|^2 in every round."""
    n = len(H)
    y, norms = np.zeros_like(a), []
    for row, gain in zip(available, gains, strict=True):
        norms.append(np.sum(np.mean([H[i] @ (w - a[i]) for i in range(n)], axis=0) ** 2))
        active = np.flatnonzero(row)
        d = {i: H[i] @ (w - a[i]) - y[i] for i in active}
        s = len(active) / n
        v = y.mean(axis=0) + (s + gain * (1 - s)) * np.mean(list(d.values()), axis=0)
        for i in active:
            y[i] += d[i]
        w = w - eta * v
    return np.array(norms)


def minimum(H, a):
    h, b = np.mean(H, axis=0), np.mean([m @ x for m, x in zip(H, a, strict=True)], axis=0)
    best = np.linalg.solve(h, b)
    return lambda w: np.mean([(w - x) @ m @ (w - x) - (best - x) @ m @ (best - x) for m, x in zip(H, a, strict=True)]) / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_descent_for_any_gains(seed):
    rng = np.random.default_rng(seed)
    n, d, rounds = int(rng.integers(2, 8)), int(rng.integers(1, 5)), 120
    H, a, L = random_problem(rng, n, d)
    available = random_schedule(rng, rounds, n, rng.uniform(0.1, 0.7))
    eta = 1 / (L * (1 + 2 * longest_gap(available)))
    gains = rng.choice([0.0, 1.0, rng.random()], rounds) if seed % 2 else rng.random(rounds)
    w = rng.normal(size=d)
    norms = run(H, a, available, eta, gains, w)
    assert (np.cumsum(norms) <= 2 * minimum(H, a)(w) / eta * (1 + 1e-9)).all()


@pytest.mark.slow
def test_the_rate_condition_is_needed():
    """At rates far above it the bound fails, for one end of the family or the other."""
    failed = {0.0: 0, 1.0: 0}
    for seed in range(20):
        for gain in failed:
            rng = np.random.default_rng(seed)
            H, a, L = random_problem(rng, 6, 3)
            available = random_schedule(rng, 200, 6, 0.1)
            w = rng.normal(size=3)
            norms = run(H, a, available, 1.5 / L, [gain] * 200, w)
            failed[gain] += bool((np.cumsum(norms) > 2 * minimum(H, a)(w) / (1.5 / L)).any())
    assert min(failed.values()) > 0, failed


def directions(algorithm, g, schedule):
    """v_t in every round, while the clients' updates stay g [N, d]."""
    n = len(g)
    state = algorithm.init(torch.zeros(g.shape[1], dtype=torch.float64), n)
    found = []
    for t, active in enumerate(schedule):
        m = torch.ones(len(active), dtype=torch.float64)
        before = state.w
        algorithm.aggregate(state, torch.tensor(active), torch.from_numpy(g[active]), mf.Step(t, 1.0, 1.0, m, m / m.sum(), m / n))
        found.append((before - state.w).numpy())
    return np.array(found)


@pytest.mark.parametrize("gain", [0.3, 0.75, 0.95])
def test_two_clients_that_take_turns(gain):
    """The error changes by -gain / (2 - gain) per round; MimiC's never changes its size."""
    g = np.array([[1.0], [-3.0]])
    turns = [[t % 2] for t in range(30)]
    error = directions(mf.FedGain(gain), g, turns)[:, 0] - g.mean()
    np.testing.assert_allclose(error[3:12] / error[2:11], -gain / (2 - gain), rtol=1e-6)
    mimic = directions(mf.MimiC(), g, turns)[:, 0] - g.mean()
    np.testing.assert_allclose(np.abs(mimic), 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_errors_never_grow_and_die_out(seed):
    rng = np.random.default_rng(seed)
    n, gain = int(rng.integers(2, 8)), rng.uniform(0.2, 0.95)
    g = rng.normal(size=(n, 3))
    alone = [[i] for _ in range(60) for i in rng.permutation(n)]  # one client a round: nobody meets, gaps below 2 n
    error = np.abs(directions(mf.FedGain(gain), g, alone) - g.mean(axis=0))
    seen = error[n:]  # from the round in which all have been seen
    tau = 2 * n
    for k in range(3):
        highest = [seen[t : t + tau, k].max() for t in range(0, len(seen) - tau, tau)]
        assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(highest))
    assert seen[-n:].max() < 0.05 * np.abs(g).max() + 1e-9
    assert np.abs(directions(mf.MimiC(), g, alone) - g.mean(axis=0))[-n:].max() > 0.1  # the clients' own updates, for ever


def test_gain_one_follows_the_sharpest_client():
    """One of N clients has all the curvature: alone in its rounds, it needs eta < 2 / L with gain 1; MIFA needs it for L / N only."""
    n, L = 6, 1.0
    H = [np.array([[L]])] + [np.array([[0.0]])] * (n - 1)
    a, w, eta = np.zeros((n, 1)), np.ones(1), 3.0 / L
    alone = np.eye(n, dtype=bool)[np.zeros(200, int)]
    alone[0] = True
    assert run(H, a, alone, eta, [1.0] * 200, w)[-1] > 1e6
    assert run(H, a, alone, eta, [0.0] * 200, w)[-1] < 1e-6


def test_gain_zero_lags_behind():
    """Equal curvatures, one client per round: MIFA diverges at a rate at which a small gain converges."""
    n, L = 10, 1.0
    H, a, w = [np.array([[L]])] * n, np.zeros((n, 1)), np.ones(1)
    available = np.eye(n, dtype=bool)[np.arange(400) % n]
    available[0] = True
    ends = {gain: run(H, a, available, 0.6 / L, [gain] * 400, w)[-1] for gain in (0.0, 0.25, 0.5)}
    assert ends[0.0] > 1e4
    assert max(ends[0.25], ends[0.5]) < 1e-4
