"""The bounds hold on hundreds of random quadratics, in every round and for every horizon, and none of their terms can be omitted."""

import numpy as np
import pytest

from mimicfl import UsageError
from mimicfl.theory import bounds, rates
from mimicfl.theory.rounds import Rounds
from tests.theory.problems import Quadratic, availability, local, loop, quadratic

INSTANCES = 250
T = 24


def instance(seed):
    """Return a problem, a schedule, the local steps and rate (within Lemma 2's condition), a start w0, and f(w0) - min f."""
    rng = np.random.default_rng(seed)
    problem = quadratic(rng)
    K = int(rng.choice([1, 1, 2, 5]))
    eta_L = rng.uniform(0.2, 1) * bounds.local_limit(problem.L, K) if K > 1 else 0.0
    available = availability(rng, T, problem.N, all_in_first_round=rng.random() < 0.7)
    w0 = 3 * rng.normal(size=problem.b.shape[1])
    return rng, problem, available, {"K": K, "eta_L": eta_L}, w0, float(problem.f(w0) - problem.f(problem.optimum))


def holds(measured, bound):
    return bool(np.all(measured <= bound * (1 + 1e-9) + 1e-12))


@pytest.mark.slow
def test_fedavg_bounds_hold_in_every_round_and_for_every_horizon():
    tightest, closest = {1: [], 2: []}, []
    for seed in range(INSTANCES):
        rng, problem, available, work, w0, Delta = instance(seed)
        eta = rng.uniform(0.05, 1, size=T) / problem.L
        rounds = Rounds(eta, available)
        m = loop(problem, available, eta, w0, "fedavg", **work)
        assert holds(np.diff(m["f"]), bounds.lemma1(rounds.eta, problem.L, m["grad2"], m["v2"], m["E"])), seed
        lemma2 = bounds.lemma2(problem.L, work["K"], work["eta_L"], m["grad2"], m["kappa2"], m["gamma"])
        assert holds(m["E"], lemma2), seed
        bound = bounds.theorem1(rounds, Delta, problem.L, m["gamma"], m["kappa2"], **work)
        measured = bounds.weighted_mean(rounds.eta, m["grad2"])
        assert holds(measured, bound), seed
        explained = bounds.summed_lemma1(rounds, Delta, problem.L, m["E"], m["v2"])
        assert holds(measured, explained), seed
        closest.append((measured / explained).max())
        tightest[min(work["K"], 2)].append((measured / bound).max())
    assert max(tightest[1]) > 0.5  # within a factor of two somewhere
    assert max(tightest[2]) > 0.3
    assert max(closest) > 0.8


@pytest.mark.slow
def test_mimic_bounds_hold_in_every_round_and_for_every_horizon():
    tightest = []
    for seed in range(INSTANCES):
        rng, problem, available, work, w0, Delta = instance(seed)
        beta = T * rng.uniform(0.2, 2)
        certified = rates.largest_c(problem.L, problem.N, Rounds(np.ones(T), available).tau_max, T, beta, **work)
        for times in (1, 5):  # certified rates, and larger ones, for which the bound uses the measured |v_t|^2
            eta = times * certified * np.maximum(available.sum(axis=1), 1) / (np.arange(T) + beta)
            rounds = Rounds(eta, available)
            m = loop(problem, available, eta, w0, "mimic", **work)
            lemma4 = bounds.lemma4(rounds, 0.3, m["E"], m["v2"], problem.L, newcomers=m["newcomers"], **work)
            assert holds(m["E"], lemma4), seed
            bound = bounds.theorem2(rounds, Delta, problem.L, m["newcomers"], m["v2"] if times > 1 else None, **work)
            assert np.isfinite(bound).all(), seed  # the certificate covers the gaps of this schedule
            measured = bounds.weighted_mean(rounds.eta, m["grad2"])
            assert holds(measured, bound), seed
            tightest.append((measured / bound).max())
    assert max(tightest) > 0.1  # within a factor of ten somewhere


@pytest.mark.slow
def test_bounds_hold_in_expectation_with_noise():
    """With 3000 replicas, the mean of a square has an error of about 3 %, and the mean of 24 such means about 1 %."""
    for seed in range(12):
        rng, problem, available, work, w0, Delta = instance(seed)
        sigma, many = float(rng.uniform(0.5, 3)), {"replicas": 3000, "seed": seed}
        noisy = work | {"sigma": sigma}
        eta = np.sort(rng.uniform(0.02, 0.5, size=T))[::-1] / problem.L
        rounds = Rounds(eta, available)
        m = loop(problem, available, eta, w0, "fedavg", **noisy, **many)
        Phi = bounds.lemma3(rounds.m, work["K"], sigma, problem.L, work["eta_L"])
        ratio = float(np.mean(m["Phi"] / Phi))
        assert ratio <= 1.02
        assert ratio >= 0.98 or work["K"] > 1  # an equality for one step
        bound = bounds.theorem1(rounds, Delta, problem.L, m["gamma"], m["kappa2"], **noisy)
        assert np.all(bounds.weighted_mean(rounds.eta, m["grad2"]) <= 1.03 * bound)

        beta = float(T)
        c = 3 * rates.largest_c(problem.L, problem.N, rounds.tau_max, T, beta, **work)
        eta = c * np.maximum(available.sum(axis=1), 1) / (np.arange(T) + beta)
        rounds = Rounds(eta, available)
        m = loop(problem, available, eta, w0, "mimic", **noisy, **many)
        assert np.mean(m["Phi"] / bounds.lemma5(rounds.m, work["K"], sigma, problem.L, work["eta_L"])) <= 1.02
        lemma4 = bounds.lemma4(rounds, 0.3, m["E"], m["v2"], problem.L, newcomers=m["newcomers"], **noisy)
        assert np.all(m["E"] <= 1.15 * lemma4 + 1e-12)
        bound = bounds.theorem2(rounds, Delta, problem.L, m["newcomers"], m["v2"], **noisy)
        assert np.all(bounds.weighted_mean(rounds.eta, m["grad2"]) <= 1.03 * bound)


# -- every term is needed ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_theorem1_fails_without_the_bias_term():
    broken = 0
    for seed in range(16):
        rng = np.random.default_rng(seed)
        problem = quadratic(rng)
        available = availability(rng, 400, problem.N, p=0.3)
        available[:, 0] = True
        eta = np.full(400, 0.3 / problem.L)
        rounds = Rounds(eta, available)
        Delta = float(problem.f(problem.optimum + 0.1) - problem.f(problem.optimum))
        m = loop(problem, available, eta, problem.optimum + 0.1, "fedavg")
        broken += not holds(bounds.weighted_mean(rounds.eta, m["grad2"]), bounds.theorem1(rounds, Delta, problem.L, 0.0))
    assert broken > 10


def test_theorem1_needs_rates_of_at_most_one_over_L():
    problem = Quadratic(np.eye(1)[None], np.zeros((1, 1)))
    available, eta, w0 = np.ones((40, 1), dtype=bool), np.full(40, 2.2), np.ones(1)
    m = loop(problem, available, eta, w0, "fedavg")
    printed = 2 * float(problem.f(w0)) / np.cumsum(eta)
    assert bounds.weighted_mean(eta, m["grad2"])[-1] > 100 * printed[-1]
    with pytest.raises(UsageError, match=r"at most 1/L = 1, got 2.2"):
        bounds.theorem1(Rounds(eta, available), 0.5, 1.0, 0.0)


@pytest.mark.slow
def test_theorem2_fails_without_the_term_for_new_clients():
    """With full participation and K = 5, MimiC equals FedAvg and converges to where the local updates cancel, not to the optimum."""
    rng = np.random.default_rng(3)
    problem = quadratic(rng, N=4, d=2, spread=3.0)
    K, eta_L = 5, bounds.local_limit(problem.L, 5)
    maps = [np.array([local(problem, e, i, K, eta_L) - local(problem, 0 * e, i, K, eta_L) for e in np.eye(2)]).T for i in range(4)]
    start = [local(problem, np.zeros(2), i, K, eta_L) for i in range(4)]
    rest = -np.linalg.solve(sum(maps), sum(start))  # where the updates sum to zero
    rounds_T = 4000
    available = np.ones((rounds_T, 4), dtype=bool)
    eta = 0.5 / problem.L * 200 / (np.arange(rounds_T) + 200)
    m = loop(problem, available, eta, rest, "mimic", K=K, eta_L=eta_L)
    Delta = float(problem.f(rest) - problem.f(problem.optimum))
    rounds, measured = Rounds(eta, available), bounds.weighted_mean(eta, m["grad2"])
    given = {"v2": m["v2"], "K": K, "eta_L": eta_L}
    assert holds(measured, bounds.theorem2(rounds, Delta, problem.L, m["newcomers"], **given))
    assert not holds(measured, bounds.theorem2(rounds, Delta, problem.L, 0.0, **given))


def test_lemma4_fails_without_the_noise_of_the_corrections():
    rng = np.random.default_rng(5)
    problem = quadratic(rng, N=4, d=3)
    available = availability(rng, 12, 4, p=0.6)
    eta = np.full(12, 1e-6)
    rounds = Rounds(eta, available)
    m = loop(problem, available, eta, np.ones(3), "mimic", sigma=2.0, replicas=2000)
    with_noise = bounds.lemma4(rounds, 1e-3, m["E"], m["v2"], problem.L, sigma=2.0, newcomers=m["newcomers"])
    printed = bounds.lemma4(rounds, 1e-3, m["E"], m["v2"], problem.L, newcomers=m["newcomers"])
    assert np.all(m["E"] <= 1.05 * with_noise + 1e-12)
    first = int(np.flatnonzero(rounds.m[1:] < 4)[0]) + 1
    assert m["E"][first] > 100 * printed[first]


@pytest.mark.slow
def test_theorem2_fails_without_the_shortfall_term_for_uncertified_rates():
    """Far above the certified rates, 2 Delta / sum eta alone is not a bound: two clients that never participate together again."""
    a, b = 0.02, 1.0
    problem = Quadratic(np.array([[[a]], [[b]]]), np.zeros((2, 1)))
    rounds_T, tau = 3000, 6
    available = np.zeros((rounds_T, 2), dtype=bool)
    available[:, 0], available[::tau] = True, [False, True]
    available[0] = True
    eta = 60 * available.sum(axis=1) / (np.arange(rounds_T) + 500)
    rounds = Rounds(eta, available)
    m = loop(problem, available, eta, np.ones(1), "mimic")
    measured = bounds.weighted_mean(eta, m["grad2"])
    Delta = float(problem.f(np.ones(1)))
    assert holds(measured, bounds.theorem2(rounds, Delta, 1.0, v2=m["v2"]))
    assert not holds(measured, 2 * Delta / np.cumsum(eta))
    assert np.isinf(bounds.theorem2(rounds, Delta, 1.0)[-1])


# -- Theorem 3 -----------------------------------------------------------------------------------------------------


def test_gaps_exceed_their_bound_with_probability_at_most_delta():
    rng = np.random.default_rng(0)
    N, rounds, p, delta, tries = 8, 60, 0.25, 0.2, 1500
    tau = rates.gap_bound(p, N, rounds, delta)
    gaps = []
    for _ in range(tries):
        available = rng.random((rounds, N)) < p
        available[0] = True
        t, _, before = Rounds(np.ones(rounds), available).returns
        number = Rounds(np.ones(rounds), available).number
        gaps.append((number[t] - number[before]).max())
    assert np.mean(np.array(gaps) > tau) <= delta
    assert np.mean(np.array(gaps) > tau - 8) > delta  # the bound is tight up to a few rounds


@pytest.mark.slow
def test_theorem3_is_theorem2_with_the_bound_as_gap():
    checked = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        problem = quadratic(rng)
        available = availability(rng, T, problem.N, p=0.7)
        tau = rates.gap_bound(0.7, problem.N, T, 0.1)
        beta = float(T)
        c = rates.largest_c(problem.L, problem.N, tau, T, beta)
        eta = c * np.maximum(available.sum(axis=1), 1) / (np.arange(T) + beta)
        rounds = Rounds(eta, available)
        if rounds.tau_max > tau:
            continue
        m = loop(problem, available, eta, np.ones(problem.b.shape[1]), "mimic")
        Delta = float(problem.f(np.ones(problem.b.shape[1])) - problem.f(problem.optimum))
        bound = bounds.theorem3(rounds, Delta, problem.L, 0.7, 0.1, m["newcomers"])
        assert np.isfinite(bound).all()
        assert holds(bounds.weighted_mean(rounds.eta, m["grad2"]), bound)
        assert np.all(bound >= bounds.theorem2(rounds, Delta, problem.L, m["newcomers"]) * (1 - 1e-12))
        checked += 1
    assert checked > 20


# -- FedAvg and MimiC compared ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mimic_converges_while_fedavg_stays_above_its_floor():
    """FedAvg converges to the minimum of the objective weighted by participation; the gradient of f at that point is the floor."""
    compared = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        N = 5
        problem = quadratic(rng, N=N, d=3, spread=2.0)
        p = rng.uniform(0.15, 0.9, size=N)
        rounds_T = 2500
        available = rng.random((rounds_T, N)) < p
        available[0] = True
        weights = np.mean([row / row.sum() for row in available if row.any()], axis=0)
        H = np.einsum("n,nab->ab", weights, problem.H)
        if np.linalg.eigvalsh(H).min() < 0.05:
            continue  # the weighted objective has no minimum
        biased = np.linalg.solve(H, np.einsum("n,nab,nb->a", weights, problem.H, problem.b))
        floor = float(np.sum(problem.full(biased) ** 2))
        eta = 0.2 / problem.L * 500 / (np.arange(rounds_T) + 500)
        w0 = problem.optimum + 1.0
        fedavg, mimic = (loop(problem, available, eta, w0, name)["grad2"][-250:] for name in ("fedavg", "mimic"))
        assert fedavg.mean() > 0.5 * floor
        assert mimic.max() < 1e-4 * min(1.0, floor)
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: bounds.theorem2(r, 1.0, -2.0), "smoothness L must be more than 0"),
        (lambda r: bounds.theorem2(r, float("nan"), 1.0), "Delta must be a number"),
        (lambda r: bounds.theorem2(r, 1.0, 1.0, tau_max=1), "largest gap of the run, 3"),
        (lambda r: bounds.theorem2(r, 1.0, 1.0, nu=0.9), "nu=0.9 is too large"),
        (lambda r: bounds.theorem1(r, 1.0, 1.0, [-1.0, 0, 0, 0]), "gamma must be finite and not negative, got -1"),
        (lambda r: bounds.theorem1(r, 1.0, 1.0, 0.0, sigma=-1.0), "sigma must be at least 0"),
        (lambda r: bounds.lemma2(1.0, 5, 0.1, 0.0, 0.0, 0.0), "at most 1/(4 L K) = 0.05, got 0.1"),
        (lambda r: bounds.theorem3(r, 1.0, 1.0, 0.99, 0.5), "lower p_min or delta"),
        (lambda r: Rounds([0.1, 0.1], r.active), "rates end after 2 rounds"),
        (lambda r: Rounds([0.1, 0.1, np.nan, 1], r.active), "got nan in round 2"),
    ],
)
def test_invalid_input_raises_usage_error(call, words):
    rounds = Rounds(np.array([0.8, 0.3, 0.2, 0.1]), np.array([[1, 1], [1, 0], [1, 0], [1, 1]], dtype=bool))
    with pytest.raises(UsageError) as error:
        call(rounds)
    assert words in str(error.value)
