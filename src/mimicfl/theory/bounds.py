"""Right-hand sides of the paper's lemmas and theorems, one function each, for the schedule of an actual run.

Notation: E_t = E|E_t[v_t] - grad f(w_t)|^2, Phi_t = E|v_t - E_t[v_t]|^2, with E_t the expectation over the batches of round t, given
the past; q_t, grad2_t = E|grad f(w_t)|^2 and v2_t = E|E_t[v_t]|^2. Without noise (sigma = 0) all of them are deterministic.
Everything is in units of the mean gradient: with `update="sum"`, pass eta_t K as the rate.

Where a printed formula does not follow from its proof, the corrected one is implemented and the docstring says so:

- the printed conditions for the local rate (Lemma 2), for the global rate (Theorem 1: none) and (lr-2) are too weak;
- with K > 1 local steps the noise of an update is not sigma^2/K: later steps amplify it (Lemmas 3 and 5, `psi`);
- MimiC's corrections carry the noise of past rounds, over which the expectation for the current round does not average (Lemma 4);
- the recursion of Lemma 4 needs a start: the error of clients that participate for the first time remains (Theorem 2).

The theorems return one entry for every horizon 1..T, to compare with `weighted_mean` of the measured gradient norms.
"""

import math
from typing import Any

import numpy as np

from ..errors import UsageError, integer, number
from .rates import choices_of_nu, gap_bound, has, needs, psi, smoothness, varphi, weight
from .rounds import Rounds, values


def weighted_mean(eta: Any, grad2: Any) -> np.ndarray:
    """The quantity that the theorems bound: sum_t eta_t grad2_t / sum_t eta_t over the first 1, 2, ..., T rounds."""
    eta, grad2 = values("the rates", eta, above_zero=True), values("the squared gradient norms", grad2)
    return np.asarray(np.cumsum(eta * grad2) / np.cumsum(eta))


def lemma1(eta: Any, L: float, grad2: Any, v2: Any, E: Any, Phi: Any = 0.0) -> np.ndarray:
    """Upper bound on E f(w_{t+1}) - E f(w_t) for one round. (The paper writes |E[v_t]|^2 for E|E_t[v_t]|^2.)"""
    eta, L = np.asarray(eta, dtype=float), smoothness(L)
    return np.asarray(-eta / 2 * grad2 - (eta / 2 - eta**2 * L / 2) * np.asarray(v2) + eta**2 * L / 2 * np.asarray(Phi) + eta / 2 * E)


def lemma2(L: float, K: int, eta_L: Any, grad2: Any, kappa2: Any, gamma: Any, sigma: float = 0.0) -> np.ndarray:
    """Upper bound on E_t of FedAvg; `kappa2` is the mean of kappa_i^2 over S_t, `gamma` the objective bias gamma_t.

    The appendix states its inequality for the local drift in other units than the lemma. The constants of the lemma follow from
    eta_L <= 1/(4 L K), but not from the printed eta_L <= 1/(10 L): after K = 200 steps on a concave f_i the drift at that rate is
    thousands of times larger than the bound. With K = 1 there is no drift, and E_t = gamma_t exactly.
    """
    eta_L = values("the local rates", eta_L)
    if integer("K", K) == 1:
        return np.asarray(values("gamma", gamma) + 0.0 * eta_L)
    if (eta_L > local_limit(L, K) * (1 + 1e-12)).any():
        raise UsageError(
            f"Lemma 2 needs local rates of at most 1/(4 L K) = {local_limit(L, K):.3g}, got {eta_L.max():g}: lower the local rate"
        )
    drift = 8 * eta_L**2 * K * (K - 1) * (np.asarray(grad2) + values("kappa", kappa2)) + 2 * eta_L**2 * (K - 1) * _noise(sigma)
    return np.asarray(2 * L**2 * drift + 2 * values("gamma", gamma))


def local_limit(L: float, K: int) -> float:
    """Return the largest local rate that Lemma 2 and Theorem 1 allow; it is infinite for one local step."""
    return 1 / (4 * smoothness(L) * K) if integer("K", K) > 1 else math.inf


def lemma3(m: Any, K: int, sigma: float, L: float = 1.0, eta_L: float = 0.0) -> np.ndarray:
    """Upper bound on Phi_t of FedAvg: psi_K sigma^2 / (|S_t| K).

    The paper has psi_K = 1, which holds for one step. With more steps, the noise of a step moves the points at which later gradients
    are evaluated; for f_i = -L w^2/2 and K = 2 the variance is ((1 + eta_L L)^2 + 1)/2 times the printed one. psi_K assumes that the
    loss of every batch is L-smooth (noise that does not depend on w is sufficient).
    """
    return np.asarray(psi(L, K, eta_L) * _noise(sigma) / (np.asarray(m, dtype=float) * integer("K", K)))


def lemma5(m: Any, K: int, sigma: float, L: float = 1.0, eta_L: float = 0.0) -> np.ndarray:
    """Upper bound on Phi_t of MimiC: the same as in Lemma 3, since the corrections are fixed before the round begins."""
    return lemma3(m, K, sigma, L, eta_L)


def lemma4(
    rounds: Rounds,
    alpha: Any,
    E: Any,
    v2: Any,
    L: float,
    K: int = 1,
    eta_L: float = 0.0,
    sigma: float = 0.0,
    newcomers: Any = 0.0,
) -> np.ndarray:
    """Upper bound on E_t of MimiC, from the measured E and v2 of the previous rounds, for any alpha_t > 0.

    `newcomers` is q_t = 1/|S_t| times the sum of |E_t[g_i] - grad f(w_t)|^2 over clients that participate for the first time and
    have no correction yet. The printed lemma has no term for them, and none for the noise of v_{t'} - g_i carried over from
    round t' = t - tau(t, i). That noise is (1 - 1/|S_t'|) psi_K sigma^2 / K per client and does not shrink with the rates.
    """
    alpha, E, v2 = (np.broadcast_to(values(name, a), rounds.T) for name, a in (("alpha", alpha), ("E", E), ("v2", v2)))
    t, _, before = rounds.returns
    noise = lemma5(rounds.m, K, sigma, L, eta_L)
    moved = _moved(rounds, v2 + noise)  # bounds E|w_t - w_{t'}|^2
    carried = E[before] + noise[before] * (rounds.m[before] - 1)
    each = (1 + alpha[t]) * carried + 2 * (1 + 1 / alpha[t]) * varphi(L, K, eta_L) * moved
    return np.asarray(rounds.over_active(each) + newcomers)


def _moved(rounds: Rounds, square: np.ndarray) -> np.ndarray:
    """tau(t,i) times the sum of eta_s^2 square_s over the rounds s from t - tau(t,i) to t - 1, one entry per return."""
    t, _, before = rounds.returns
    run = np.concatenate([[0.0], np.cumsum(rounds.eta**2 * square)])
    return np.asarray((t - before) * (run[t] - run[before]))


def theorem1(
    rounds: Rounds, Delta: float, L: float, gamma: Any, kappa2: Any = 0.0, K: int = 1, eta_L: Any = 0.0, sigma: float = 0.0
) -> np.ndarray:
    """FedAvg: upper bound on the weighted mean of the squared gradient norms, for every horizon.

    Requires Lemma 2's condition and eta_t <= 1/L, which the paper uses to drop the term with |E[v_t]|^2 but does not state. For
    K > 1, Gamma_T counts twice (the appendix has 2 gamma_t but multiplies it by L^2/|S_t|; the theorem omits the 2). For K = 1 it
    counts once, since then E_t = gamma_t. The paper has the factor 1 - C_K on the left side; here it is on the right.
    """
    L, K, Delta = smoothness(L), integer("K", K), number("Delta", Delta, low=0)
    if (rounds.eta > (1 + 1e-12) / L).any():
        raise UsageError(f"Theorem 1 needs rates of at most 1/L = {1 / L:.3g}, got {rounds.eta.max():.3g}: lower the global rate")
    rate = np.broadcast_to(values("the local rates", eta_L), rounds.T)
    largest = float(rate.max())
    E = lemma2(L, K, rate, 0.0, kappa2, gamma, sigma)
    noise = lemma3(rounds.m, K, sigma, L, largest)
    C = 16 * largest**2 * L**2 * K * (K - 1)
    return np.asarray((2 * Delta + np.cumsum(rounds.eta**2 * L * noise + rounds.eta * E)) / ((1 - C) * np.cumsum(rounds.eta)))


def theorem2(
    rounds: Rounds,
    Delta: float,
    L: float,
    newcomers: Any = 0.0,
    v2: Any = None,
    K: int = 1,
    eta_L: float = 0.0,
    sigma: float = 0.0,
    nu: float | None = None,
    tau_max: int | None = None,
) -> np.ndarray:
    """MimiC with bounded gaps: upper bound on the weighted mean of the squared gradient norms, for every horizon.

    sum_t eta_t grad2_t <= 2 Delta + (1/nu) sum_t eta_t q_t
        + sum_t eta_t^2 L Phi_t + (1/nu) sum_j eta_j * [the noise terms of Lemma 4 in round j],  if (lr-1) and (*) of `rates` hold.

    Not in the paper: q_t, see Lemma 4 (if all clients participate in round 0 it is E_0, which is zero only for K = 1), the carried
    noise, and the condition nu < 1 - 1/rho_t. If (*) fails, the bound is infinite, unless the measured `v2` is given: then the
    shortfall 2 (needs - has) eta_t^2 v2_t is added, and the bound holds for any rates with rho_t > 1. It is infinite from the first
    rho_t <= 1 on. Any nu gives a bound; None selects the nu with the lowest. With `tau_max`, the bound holds for all gaps up to it
    instead of the gaps of this run.
    """
    L, Delta, phi = smoothness(L), number("Delta", Delta, low=0), varphi(L, K, eta_L)
    if tau_max is not None and integer("tau_max", tau_max) < rounds.tau_max:
        raise UsageError(f"tau_max={tau_max} is smaller than the largest gap of the run, {rounds.tau_max}: give at least that")
    stop = _rounds_with_rho_above_one(rounds)
    known = rounds.head(stop)
    q = np.broadcast_to(values("newcomers", newcomers), rounds.T)[:stop]
    square = None if v2 is None else values("v2", v2)[:stop]

    def total(nu: float) -> np.ndarray:
        found = 2 * Delta + np.cumsum(known.eta * q) / nu + _noise_terms(known, nu, L, K, eta_L, sigma, tau_max)
        short = np.maximum(needs(known, nu, phi, tau_max) - has(known, L), 0.0)
        if square is not None:
            return np.asarray(found + np.cumsum(2 * short * known.eta**2 * square))
        return np.where(np.cumsum(short > 0) > 0, np.inf, found)

    if nu is None:
        least = min((total(nu) for nu in choices_of_nu(known)), key=lambda found: (np.isinf(found).sum(), found[-1]))
    elif np.isfinite(weight(known, number("nu", nu, low=0, high=1, open_low=True))).all():
        least = total(nu)
    else:
        raise UsageError(f"nu={nu} is too large: it must lie below 1 - 1/rho_t = {1 - 1 / known.rho.min():.3g} in every round")
    return np.concatenate([least / np.cumsum(known.eta), np.full(rounds.T - stop, np.inf)])


def theorem3(
    rounds: Rounds,
    Delta: float,
    L: float,
    p_min: float,
    delta: float,
    newcomers: Any = 0.0,
    v2: Any = None,
    K: int = 1,
    eta_L: float = 0.0,
    sigma: float = 0.0,
    nu: float | None = None,
) -> np.ndarray:
    """MimiC if every client participates with probability >= p_min, independently of the past: Theorem 2, with probability 1 - delta.

    tau_max is `gap_bound(p_min, N, T, delta)`, which no gap exceeds with probability 1 - delta. Raises a `UsageError` if a gap of this
    run does. The paper's Assumption 5 does not mention independence, and its bound has an unspecified constant lambda.
    """
    tau = gap_bound(p_min, rounds.N, int(rounds.number[-1]) + 1, delta)
    if tau < rounds.tau_max:
        raise UsageError(
            f"the run has a gap of {rounds.tau_max} rounds but gaps are at most {tau} with probability 1 - {delta:g} "
            f"if every client participates with p >= {p_min:g}: lower p_min or delta"
        )
    return theorem2(rounds, Delta, L, newcomers, v2, K, eta_L, sigma, nu, tau)


def summed_lemma1(rounds: Rounds, Delta: float, L: float, E: Any, v2: Any) -> np.ndarray:
    """Lemma 1 summed over all rounds, for any algorithm and any rates, from the measured E_t = |v_t - grad f(w_t)|^2 and v2_t = |v_t|^2.

    It holds for every single run, including its noise, and shows how much of the gradient norm E_t explains.
    """
    E, v2, L, Delta = values("E", E), values("v2", v2), smoothness(L), number("Delta", Delta, low=0)
    return np.asarray((2 * Delta + np.cumsum(rounds.eta * E + (rounds.eta**2 * L - rounds.eta) * v2)) / np.cumsum(rounds.eta))


def _rounds_with_rho_above_one(rounds: Rounds) -> int:
    """Return the number of rounds until the condition rho_t > 1 fails for the first time."""
    rising = np.flatnonzero(rounds.rho <= 1 + 1e-12)
    return int(rising[0]) + 1 if len(rising) else rounds.T


def _noise_terms(rounds: Rounds, nu: float, L: float, K: int, eta_L: float, sigma: float, tau_max: int | None) -> np.ndarray:
    """Return the contribution of the noise to sum_t eta_t grad2_t, for every horizon."""
    noise = lemma5(rounds.m, K, sigma, L, eta_L)
    t, _, before = rounds.returns
    grown = np.concatenate([[1.0], rounds.rho * (1 - nu)])  # 1 + alpha_t
    moved = _moved(rounds, noise)
    carried = noise[before] * (rounds.m[before] - 1)
    if tau_max is not None:
        run = np.concatenate([[0.0], np.cumsum(rounds.eta**2 * noise)])
        moved = tau_max * (run[t] - run[np.maximum(t - tau_max, 0)])
    later = rounds.over_active(grown[t] * carried) * rounds.eta
    later += rounds.over_active(weight(rounds, nu)[t] * rounds.m[t] * 2 * varphi(L, K, eta_L) * moved)
    return np.asarray(np.cumsum(rounds.eta**2 * L * noise + later / nu))


def _noise(sigma: float) -> float:
    return number("sigma", sigma, low=0) ** 2
