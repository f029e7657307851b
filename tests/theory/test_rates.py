"""`largest_c` is optimal, the conditions match the proofs, and counterexamples refute the printed conditions."""

import numpy as np
import pytest

import mimicfl as mf
from mimicfl.theory import bounds, rates
from mimicfl.theory.rounds import Rounds
from tests.theory.problems import Quadratic, availability, local, loop, quadratic


def settings(rng):
    K = int(rng.choice([1, 3]))
    given = {"L": float(rng.uniform(0.2, 5)), "N": int(rng.integers(1, 40)), "tau_max": int(rng.integers(1, 30))}
    given |= {"horizon": int(rng.integers(1, 200)), "beta": float(rng.uniform(0.5, 300)), "K": K, "eta_L": 0.01 * (K > 1)}
    return given | {"nu": float(rng.uniform(0.05, 0.95)) * min(1, 1 / (given["horizon"] - 1 + given["beta"]))}


def test_largest_c_is_the_largest():
    """The closed form checks two rounds; this test checks all rounds, just below and just above the limit."""
    for seed in range(400):
        given = settings(np.random.default_rng(seed))
        c = rates.largest_c(**given)
        assert rates.worst_round(c * (1 - 1e-9), **given)[1] >= 0, given
        assert rates.worst_round(c * (1 + 1e-6), **given)[1] < 0, given


@pytest.mark.slow
def test_certificate_covers_every_schedule_with_gaps_up_to_tau_max():
    """(*) for the gaps of a schedule holds if the worst case of the closed form does, and equals the sum of the proof, term by term."""
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
                for i in np.flatnonzero(rounds.active[j]):
                    before = np.flatnonzero(rounds.active[:j, i])
                    if len(before) and before[-1] <= t:
                        naive[t] += phi / nu * rounds.x[j] * (1 + 1 / alpha) * (j - before[-1])
        assert np.allclose(needed, naive, rtol=1e-9, atol=1e-9)


def test_both_forms_of_varphi_bound_the_change_of_the_drift():
    closest = 0.0
    against = Quadratic(np.array([[[-1.0]]] + 49 * [[[1.0]]]), np.zeros((50, 1)))  # one client has negative curvature
    for seed in range(100):
        rng = np.random.default_rng(seed)
        problem = quadratic(rng) if seed else against
        K = int(rng.integers(1, 8))
        eta_L = float(rng.uniform(0, 0.3)) / problem.L
        a, b = rng.normal(size=(2, problem.b.shape[1]))
        for i in range(problem.N):
            drift = [local(problem, w, i, K, eta_L) - problem.full(w) for w in (a, b)]
            change = np.sum((drift[0] - drift[1]) ** 2) / np.sum((a - b) ** 2)
            corrected, printed = rates.varphi(problem.L, K, eta_L), rates.varphi(problem.L, K, eta_L, printed=True)
            assert change <= 2 * corrected <= 2 * printed * (1 + 1e-12)
            closest = max(closest, change / (2 * corrected))
    assert closest > 0.9


def test_certified_rates_have_a_bounded_sum():
    """The sum is bounded for every horizon, so the bound of Theorem 2 does not converge to zero, see docs/theory.md.

    Checked for the rates of Lemma 6 and for geometric rates.
    """
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


# -- counterexamples to the printed conditions ---------------------------------------------------------------------


@pytest.mark.slow
def test_printed_theorem2_fails_if_clients_never_participate_together():
    """K = 1, no noise, all clients in round 0, gaps of at most 6, Lemma 6's rates with the printed c: more than twice the printed bound."""
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
    assert abs(m["final"].item()) > 1  # the optimum is 0, the minimum of both clients
    assert measured <= bounds.theorem2(rounds, float(problem.f(np.ones(1))), 1.0, v2=m["v2"])[-1]


def test_printed_theorem2_fails_at_the_minimum():
    """Everybody participates in every round, K = 2, no noise, all printed conditions hold, Delta = 0: the printed bound is zero."""
    problem = Quadratic(np.array([[[1.0]], [[0.5]]]), np.array([[1.0], [-1.0]]))
    T, beta, eta_L = 50, 50.0, 0.1
    nu = 0.9 / (T + beta)
    c = rates.printed_c(1.0, 2, 1, T, beta, nu, K=2, eta_L=eta_L)
    available = np.ones((T, 2), dtype=bool)
    eta = c * 2 / (np.arange(T) + beta)
    assert np.all(_printed_condition(eta, available, nu, rates.varphi(1.0, 2, eta_L, printed=True), tau=1))
    m = loop(problem, available, eta, problem.optimum, "mimic", K=2, eta_L=eta_L)
    assert m["grad2"][0] == pytest.approx(0, abs=1e-30)  # the run begins at the minimum
    assert bounds.weighted_mean(eta, m["grad2"])[-1] > 1e-6


def _printed_condition(eta, available, nu, phi, tau, L=1.0):
    """The printed (lr-2), for every round but the last, with the printed conditions on rho_t and nu."""
    rounds = Rounds(eta, available)
    left = (1 / (2 * rounds.eta) - L / 2) / rounds.eta
    right = (rounds.rho - nu) * phi * tau * rounds.N / (2 * nu * rounds.m[:-1])
    return (left[:-1] >= right * (1 - 1e-9)) & (rounds.rho > 1 + nu)


def test_rates_of_the_pictured_example_violate_the_condition_in_every_round():
    """examples/never_meet.py: c = 40, beta = 300, gaps of 6, L = 1, for any valid nu."""
    T = 1200
    available = np.zeros((T, 2), dtype=bool)
    available[:, 0], available[::6] = True, [False, True]
    available[0] = True
    eta = 40 * available.sum(axis=1) / (np.arange(T) + 300)
    rounds = Rounds(eta, available)
    for share in (0.01, 0.3, 0.6, 0.99):
        assert not _printed_condition(eta, available, share * (rounds.rho.min() - 1), rates.varphi(1.0, printed=True), tau=6).any()
    for nu in rates.choices_of_nu(rounds):  # as corrected; nobody returns after the last rounds, which therefore need nothing
        assert not (rates.has(rounds, 1.0) >= rates.needs(rounds, nu, rates.varphi(1.0)))[: T - 6].any()


def test_constant_nu_makes_the_rates_geometric():
    """rho_t >= 1 + nu in every round bounds the sum of the rates, whatever their number; Lemma 6's rates violate it at some point."""
    nu, N, beta = 0.01, 10, 5.0
    x = np.cumprod(np.full(100_000, 1 / (1 + nu)))  # rates that fall as slowly as possible
    assert N * x.sum() <= N * x[0] * (1 + nu) / nu
    t = np.arange(1000)
    rho = (t + 1 + beta) / (t + beta)
    assert np.flatnonzero(rho < 1 + nu)[0] == pytest.approx(1 / nu - beta, abs=1.5)


def test_noise_of_the_printed_theorem2_does_not_vanish():
    """Lemma 6's rates with a fixed c, and in every round the nu with the smallest term: a constant share of sum eta_t remains."""
    c, beta, m, floors = 0.1, 10.0, 3, []
    for T in (10**3, 10**5, 10**6):
        s = np.arange(T) + beta
        rho, eta, after = (s + 1) / s, c * m / s, c * m / (s + 1)
        nu = 1 / (2 * s)
        assert np.all(nu * (rho - 1 - nu) <= 1 / (4 * s**2) * (1 + 1e-9))
        noise = np.sum(rho * (rho - nu) * eta / (nu * (rho - 1 - nu)) * after**2 / m**2)
        floors.append(noise / eta.sum())
    assert floors[-1] > 0.9 * floors[0] > 0
    assert floors[-1] == pytest.approx(4 * c**2, rel=0.1)


def test_printed_condition_of_lemma2_fails_for_many_steps():
    """Identical concave clients: no bias, no heterogeneity, eta_L = 1/(10 L)."""
    problem = Quadratic(np.array([[[-1.0]], [[-1.0]]]), np.zeros((2, 1)))
    K, eta_L = 200, 1 / 10.0
    m = loop(problem, np.array([[True, False]]), [1.0], np.ones(1), "fedavg", K=K, eta_L=eta_L)
    assert m["kappa2"][0] == m["gamma"][0] == 0
    printed = 2 * 8 * eta_L**2 * K * (K - 1) * m["grad2"]
    assert m["E"][0] > 1e10 * printed[0]


def test_printed_lemma3_fails_for_two_steps():
    problem = Quadratic(np.array([[[-1.0]], [[1.2]]]), np.zeros((2, 1)))
    m = loop(problem, np.array([[True, False]]), [1.0], np.ones(1), "fedavg", K=2, eta_L=0.08, sigma=1.0, replicas=400_000)
    printed = 1.0 / 2
    assert m["Phi"][0] == pytest.approx(printed * (1.08**2 + 1) / 2, rel=0.01)
    assert m["Phi"][0] > 1.05 * printed
    assert m["Phi"][0] <= 1.01 * bounds.lemma3(1, 2, 1.0, 1.2, 0.08)


def test_other_reading_of_lemma3_makes_v_and_its_noise_correlated():
    """f = -w^2/2, K = 2, noise of ±1 in each step: around the mean gradient at the visited models the variance is as printed."""
    eta_L, w = 0.08, 1.0
    noise = np.array([[a, b] for a in (-1.0, 1.0) for b in (-1.0, 1.0)])  # all four cases, each with probability 1/4
    second = w + eta_L * w - eta_L * noise[:, 0]  # the local model after one step: w - eta_L (-w + noise)
    visited = (-w - second) / 2
    v = visited + noise.mean(axis=1)
    assert np.mean((v - visited) ** 2) == pytest.approx(1 / 2)  # sigma^2 / K, as printed
    assert np.mean(visited * (v - visited)) == pytest.approx(eta_L / 4)  # not zero, as Lemma 1 would need
    assert np.mean((v - v.mean()) ** 2) == pytest.approx(((1 + eta_L) ** 2 + 1) / 4)  # the other meaning: psi_K times the printed one


# -- the learning rate `theory` --------------------------------------------------------------------------------------


def test_theory_rate_computes_c():
    rate = mf.lr.theory(L=2.0, N=6, tau_max=4, horizon=50, beta=20)
    assert rate.c == rates.largest_c(2.0, 6, 4, 50, 20)
    assert rate(3, 5) == rate.c * 5 / 23
    assert mf.lr.schedule("theory:L=2,N=6,tau_max=4,horizon=50,beta=20") == mf.lr.schedule(
        f"theory:c={rate.c!r},L=2,N=6,tau_max=4,horizon=50,beta=20"
    )
    assert mf.lr.theory(0.1, 10)(0, 2) == 0.02  # with c, no constants are needed


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "needs c, or the constants L, N, tau_max and horizon"),
        ({"L": 1.0, "N": 3, "tau_max": 2}, "horizon is missing"),
        ({"L": -1.0, "N": 3, "tau_max": 2, "horizon": 5}, "smoothness L must be more than 0"),
        ({"L": float("nan"), "N": 3, "tau_max": 2, "horizon": 5}, "smoothness L must be a number"),
        ({"L": 1.0, "N": 3, "tau_max": 0, "horizon": 5}, "tau_max must be a whole number of at least 1"),
        ({"L": 1.0, "N": 3, "tau_max": 2, "horizon": 5, "nu": 0.5}, "nu=0.5 is too large"),
        ({"L": 1.0, "N": 3, "tau_max": 2, "horizon": 5, "K": 4}, "eta_L is missing"),
        ({"c": 1.0, "L": 1.0, "N": 3, "tau_max": 2, "horizon": 5}, "c=1 is above the largest"),
    ],
)
def test_invalid_constants_raise_usage_error(given, words):
    with pytest.raises(mf.UsageError) as error:
        mf.lr.theory(**given)
    assert words in str(error.value)


def test_theory_rate_in_a_run(quadratic):
    rate = mf.lr.theory(L=40.0, N=6, tau_max=30, horizon=30, beta=30)
    local = mf.LocalSGD(steps=1, batch_size=None, lr=0.01)
    history = mf.simulate(**quadratic, rounds=30, availability="static:0.5,warm_start=true", local=local, global_lr=rate, update="mean")
    assert [row["global_lr"] for row in history.rows if row["active"]] == [
        rate(r["round"], r["active"]) for r in history.rows if r["active"]
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"horizon": 20}, "set horizon=30"),
        ({"N": 4}, "set N=6"),
        ({"tau_max": 2}, "set tau_max=5"),
        ({"K": 2}, "set K=3"),
        ({"eta_L": 0.001}, "set eta_L=0.01"),
        ({"update": "sum"}, "update='mean'"),
    ],
)
def test_theory_rate_must_match_the_run(quadratic, change, words):
    update = change.pop("update", "mean")
    rate = mf.lr.theory(**{"L": 40.0, "N": 6, "tau_max": 5, "horizon": 30, "K": 3, "eta_L": 0.01} | change)
    schedule = np.ones((30, 6), dtype=bool)
    schedule[3:7, 1] = False
    given = {"availability": mf.availability.Explicit(schedule), "local": mf.LocalSGD(steps=3, batch_size=None, lr=0.01)}
    with pytest.raises(mf.UsageError) as error:
        mf.simulate(**quadratic, **given, global_lr=rate, update=update)
    assert words in str(error.value)


def test_theory_rate_is_refused_in_asynchronous_training(quadratic):
    """Its clients start from older models, which the proof does not know."""
    rate, local = mf.lr.theory(L=40.0, N=6, tau_max=30, horizon=30, K=3, eta_L=0.01), mf.LocalSGD(steps=3, batch_size=None, lr=0.01)
    with pytest.raises(mf.UsageError, match="asynchronous"):
        mf.simulate(**quadratic, rounds=30, local=local, global_lr=rate, update="mean", speed=10.0, asynchronous=6)


def test_no_weight_is_finite_without_decay():
    """With nu = 1, alpha_j = -1 in every round, and the condition cannot hold."""
    rounds = Rounds(np.full(4, 0.1), np.ones((4, 2), dtype=bool))
    assert rates.weight(rounds, 1.0).tolist() == [0.0, np.inf, np.inf, np.inf]


def test_numbers_beyond_floating_point():
    """With many local steps the printed factor overflows, which doubles with each of them; with a large rate the correct one does."""
    assert rates.varphi(2.0, K=2000, eta_L=1e-4, printed=True) == np.inf
    assert rates.varphi(2.0, K=2000, eta_L=1e-4) < 11
    with pytest.raises(mf.UsageError, match="lower the local learning rate"):
        mf.lr.theory(L=200.0, N=6, tau_max=4, horizon=50, beta=20, K=250, eta_L=0.1)
