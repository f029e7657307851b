"""The largest c is the largest, the conditions are the proof's, and the printed ones are refuted by examples."""

import numpy as np
import pytest

import mimicfl as mf
from mimicfl.theory import bounds, rates
from mimicfl.theory.rounds import Rounds

from .problems import Quadratic, availability, local, loop, quadratic


def settings(rng):
    K = int(rng.choice([1, 3]))
    given = {"L": float(rng.uniform(0.2, 5)), "N": int(rng.integers(1, 40)), "tau_max": int(rng.integers(1, 30))}
    given |= {"horizon": int(rng.integers(1, 200)), "beta": float(rng.uniform(0.5, 300)), "K": K, "eta_L": 0.01 * (K > 1)}
    return given | {"nu": float(rng.uniform(0.05, 0.95)) * min(1, 1 / (given["horizon"] - 1 + given["beta"]))}


def test_the_closed_form_is_the_largest_c():
    """Two ends are looked at; here all rounds are, just below and just above."""
    for seed in range(400):
        given = settings(np.random.default_rng(seed))
        c = rates.largest_c(**given)
        assert rates.worst_round(c * (1 - 1e-9), **given)[1] >= 0, given
        assert rates.worst_round(c * (1 + 1e-6), **given)[1] < 0, given


def test_the_certificate_covers_every_schedule_within_tau_max():
    """(*) with the gaps that happened holds whenever the closed form's worst case does, and is the proof's sum, term by term."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        T, N, beta = 30, 5, float(rng.uniform(5, 60))
        available = availability(rng, T, N)
        tau = Rounds(np.ones(T), available).tau_max
        nu = float(rng.uniform(0.2, 0.8)) / (T - 1 + beta)
        c = rates.largest_c(2.0, N, tau, T, beta, nu)
        rounds = Rounds(c * np.maximum(available.sum(axis=1), 1) / (np.arange(T) + beta), available)
        phi = rates.varphi(2.0)
        needed = rates.needs(rounds, nu, phi)
        assert np.all(rates.has(rounds, 2.0) >= needed * (1 - 1e-9))
        assert np.all(rates.needs(rounds, nu, phi, tau) >= needed * (1 - 1e-9) - 1e-9)
        naive = np.zeros(rounds.T)
        for t in range(rounds.T):
            for j in range(t + 1, rounds.T):
                alpha = rounds.rho[j - 1] * (1 - nu) - 1
                for i in np.flatnonzero(rounds.available[j]):
                    before = np.flatnonzero(rounds.available[:j, i])
                    if len(before) and before[-1] <= t:
                        naive[t] += phi / nu * rounds.x[j] * (1 + 1 / alpha) * (j - before[-1])
        assert np.allclose(needed, naive, rtol=1e-9, atol=1e-9)


def test_both_forms_of_varphi_bound_the_change_of_the_drift():
    closest = 0.0
    against = Quadratic(np.array([[[-1.0]]] + 49 * [[[1.0]]]), np.zeros((50, 1)))  # one client bends the other way
    for seed in range(100):
        rng = np.random.default_rng(seed)
        problem = quadratic(rng) if seed else against
        K = int(rng.integers(1, 8))
        eta_L = float(rng.uniform(0, 0.3)) / problem.L
        a, b = rng.normal(size=(2, problem.b.shape[1]))
        for i in range(problem.N):
            drift = [local(problem, w, i, K, eta_L) - problem.full(w) for w in (a, b)]
            change = np.sum((drift[0] - drift[1]) ** 2) / np.sum((a - b) ** 2)
            own, printed = rates.varphi(problem.L, K, eta_L), rates.varphi(problem.L, K, eta_L, printed=True)
            assert change <= 2 * own <= 2 * printed * (1 + 1e-12)
            closest = max(closest, change / (2 * own))
    assert closest > 0.9


def test_certified_rates_have_a_bounded_sum():
    """docs/theory.md: however long the run, so the bound of Theorem 2 does not go to zero. Lemma 6's rates, and geometric ones."""
    L, N, closest = 1.7, 8, 0.0
    for tau in (1, 5, 40):
        for horizon in (10, 300, 10_000, 100_000):
            for beta in (2.0, horizon / 10, float(horizon), 10.0 * horizon):
                nu = 0.5 / (horizon - 1 + beta)
                total = rates.largest_c(L, N, tau, horizon, beta, nu) * N * np.sum(1 / (np.arange(horizon) + beta))
                most = (np.pi / (2 * np.sqrt(tau * (1 - nu))) + 2) / L
                assert total <= most
                closest = max(closest, total / most)
        for nu in (1e-4, 1e-2, 0.3):
            for a in nu * np.array([0.3, 1.0, 3.0]):
                x = 0.999 * np.sqrt(nu * a / (2 * rates.varphi(L) * N**2 * tau * (1 - nu))) * ((1 - nu) / (1 + a)) ** np.arange(3000)
                assert N * x.sum() <= (np.pi / (2 * np.sqrt(tau * (1 - nu))) + 2) / L
    assert closest > 0.05


# -- what is printed and does not hold -----------------------------------------------------------------------------


def test_the_printed_theorem2_fails_where_clients_never_meet():
    """K = 1, no noise, everybody in round 0, gaps of at most 6, Lemma 6's rates with the printed c: twice the printed bound."""
    a, b, tau, T = 0.02, 1.0, 6, 20_000
    beta = float(T)
    nu = 0.95 / (T - 1 + beta)  # below rho_t - 1 in every round, as Lemma 4 needs
    c = rates.printed_c(1.0, 2, tau, T, beta, nu)
    available = np.zeros((T, 2), dtype=bool)
    available[:, 0], available[::tau] = True, [False, True]
    available[0] = True
    rounds = Rounds(c * available.sum(axis=1) / (np.arange(T) + beta), available)
    assert np.all(rounds.rho - 1 - nu > 0)
    phi = rates.varphi(1.0, printed=True)
    left = (1 / (2 * rounds.eta) - 0.5) / rounds.eta
    right = (np.append(rounds.rho, 1.0) - nu) * phi * tau * 2 / (2 * nu * rounds.m)
    assert np.all(left[:-1] >= right[:-1] * (1 - 1e-9))  # the printed (lr-2) holds in every round
    problem = Quadratic(np.array([[[a]], [[b]]]), np.zeros((2, 1)))
    m = loop(problem, available, rounds.eta, np.ones(1), "mimic")
    measured = bounds.weighted_mean(rounds.eta, m["grad2"])[-1]
    printed = 2 * float(problem.f(np.ones(1))) / rounds.eta.sum()
    assert measured > 2 * printed
    assert abs(m["final"].item()) > 1  # the optimum is 0, where both clients' own minima lie
    assert measured <= bounds.theorem2(rounds, float(problem.f(np.ones(1))), 1.0, v2=m["v2"])[-1]


def test_the_printed_condition_of_lemma2_fails_for_many_steps():
    problem = Quadratic(np.array([[[-1.0]], [[1.2]]]), np.zeros((2, 1)))  # L = 1.2; client 0 is concave
    K, eta_L = 200, 1 / 12.0
    w, available = np.ones(1), np.array([[True, False]])
    m = loop(problem, available, [1.0], w, "fedavg", K=K, eta_L=eta_L)
    drift = 8 * eta_L**2 * K * (K - 1) * (m["grad2"] + m["kappa2"])
    printed = 2 * 1.2**2 * drift + 2 * m["gamma"]
    assert m["E"][0] > 100 * printed[0]


def test_the_printed_lemma3_fails_for_two_steps():
    problem = Quadratic(np.array([[[-1.0]], [[1.2]]]), np.zeros((2, 1)))
    m = loop(problem, np.array([[True, False]]), [1.0], np.ones(1), "fedavg", K=2, eta_L=0.08, sigma=1.0, replicas=400_000)
    printed = 1.0 / 2
    assert m["Phi"][0] == pytest.approx(printed * (1.08**2 + 1) / 2, rel=0.01)
    assert m["Phi"][0] > 1.05 * printed
    assert m["Phi"][0] <= 1.01 * bounds.lemma3(1, 2, 1.0, 1.2, 0.08)


# -- as a schedule ---------------------------------------------------------------------------------------------------


def test_the_rate_finds_its_own_c():
    rate = mf.lr.theory(L=2.0, N=6, tau_max=4, horizon=50, beta=20)
    assert rate.c == rates.largest_c(2.0, 6, 4, 50, 20)
    assert rate(3, 5) == rate.c * 5 / 23
    assert mf.lr.schedule("theory:L=2,N=6,tau_max=4,horizon=50,beta=20") == mf.lr.schedule(
        f"theory:c={rate.c!r},L=2,N=6,tau_max=4,horizon=50,beta=20"
    )
    assert mf.lr.theory(0.1, 10)(0, 2) == 0.02  # c given: no constants are needed


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "needs c, or the constants L, N, tau_max and horizon"),
        ({"L": 1.0, "N": 3, "tau_max": 2}, "horizon is missing"),
        ({"L": -1.0, "N": 3, "tau_max": 2, "horizon": 5}, "the smoothness L must be more than 0, got -1.0"),
        ({"L": float("nan"), "N": 3, "tau_max": 2, "horizon": 5}, "the smoothness L must be a number, got nan"),
        ({"L": 1.0, "N": 3, "tau_max": 0, "horizon": 5}, "tau_max must be a whole number of at least 1, got 0"),
        ({"L": 1.0, "N": 3, "tau_max": 2, "horizon": 5, "nu": 0.5}, "nu=0.5 is too large"),
        ({"L": 1.0, "N": 3, "tau_max": 2, "horizon": 5, "K": 4}, "eta_L is missing"),
        ({"c": 1.0, "L": 1.0, "N": 3, "tau_max": 2, "horizon": 5}, "is above the largest with a certificate"),
    ],
)
def test_bad_constants(given, sentence):
    with pytest.raises(mf.UsageError) as error:
        mf.lr.theory(**given)
    assert sentence in str(error.value)


def test_in_a_run(quadratic):
    rate = mf.lr.theory(L=40.0, N=6, tau_max=30, horizon=30, beta=30)
    local = mf.LocalSGD(steps=1, batch_size=None, lr=0.01)
    history = mf.simulate(**quadratic, rounds=30, availability="static:0.5,warm_start=true", local=local, global_lr=rate, update="mean")
    assert [row["global_lr"] for row in history.rows if row["active"]] == [
        rate(r["round"], r["active"]) for r in history.rows if r["active"]
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"horizon": 20}, "found for horizon=20, this run has 30: give horizon=30"),
        ({"N": 4}, "found for N=4, this run has 6: give N=6"),
        ({"tau_max": 2}, "found for tau_max=2, this run has 5: give tau_max=5"),
        ({"K": 2}, "found for K=2, this run has 3: give K=3"),
        ({"eta_L": 0.001}, "found for eta_L=0.001, this run has 0.01: give eta_L=0.01"),
        ({"update": "sum"}, "found for update='mean'"),
    ],
)
def test_a_rate_must_fit_the_run_it_was_found_for(quadratic, change, sentence):
    update = change.pop("update", "mean")
    rate = mf.lr.theory(**{"L": 40.0, "N": 6, "tau_max": 5, "horizon": 30, "K": 3, "eta_L": 0.01} | change)
    schedule = np.ones((30, 6), dtype=bool)
    schedule[3:7, 1] = False
    given = {"availability": mf.availability.Explicit(schedule), "local": mf.LocalSGD(steps=3, batch_size=None, lr=0.01)}
    with pytest.raises(mf.UsageError) as error:
        mf.simulate(**quadratic, **given, global_lr=rate, update=update)
    assert sentence in str(error.value)
