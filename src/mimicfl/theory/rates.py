"""Certified rates: conditions (lr-1) and (lr-2) of Theorem 2, and the largest c of Lemma 6's eta_t = c |S_t| / (t + beta).

The paper's (lr-2) does not follow from its proof: from (help-1) to (R3), the factor 1 + 1/alpha_t becomes 1, and the sum over later
rounds loses its indices. With both restored (and rho taken where the proof needs it, between the round before a return and the
return), the proof requires, for some 0 < nu < 1 - 1/rho_t, x_t = eta_t / |S_t| and 1 + alpha_j = rho_{j-1} (1 - nu),

    1/(2 eta_t) - L/2  >=  (phi_K / nu) * sum over later rounds j and i in S_j with j - tau(j,i) <= t < j of
                                          x_j (1 + 1/alpha_j) tau(j,i).                                            (*)

Every client contributes at most one term, its first return after t, so there are at most N terms with tau(j,i) <= tau_max. With
eta_t = c |S_t| / (t + beta), x_j (1 + 1/alpha_j) = c (1 - nu) / (1 - nu (j + beta)). `largest_c` solves this condition, `printed_c`
the one printed in the paper. docs/theory.md shows where the printed one fails, and why rates that satisfy (*) have a bounded sum.
"""

import math
from typing import Any

import numpy as np

from ..errors import UsageError, integer, number
from .rounds import Rounds

SEARCH = np.concatenate([np.geomspace(1e-4, 0.1, 13), np.linspace(0.15, 0.95, 17)])  # candidates, as shares of the largest nu


def varphi(L: float, K: int = 1, eta_L: float = 0.0, *, printed: bool = False) -> float:
    """phi_K of Lemma 4: 2 phi_K |w - w'|^2 bounds the change of client i's drift between w and w'.

    With a constant eta_L, k local steps increase distances by at most (1 + eta_L L)^k, so the mean update is Lipschitz with
    l_K = ((1 + eta_L L)^K - 1) / (K eta_L) and phi_K = l_K^2 + L^2. The paper's (2 + 2 eta_L^2 L^2)^k is also valid, but doubles
    with every local step. Both are 2 L^2 for K = 1.

    >>> varphi(3.0), varphi(3.0, printed=True)
    (18.0, 18.0)
    >>> varphi(1.0, K=10, eta_L=0.01) < 2.2, varphi(1.0, K=10, eta_L=0.01, printed=True) > 100
    (True, True)
    """
    L, K, eta_L = smoothness(L), integer("K", K), number("eta_L", eta_L, low=0)
    a = eta_L * L
    try:
        if printed:
            return ((2 + 2 * a * a) ** K - 1) / (K * (2 * a * a + 1)) * L**2 + L**2
        stretch = math.expm1(K * math.log1p(a)) / (K * a) if a else 1.0
        return L**2 * (stretch**2 + 1)
    except OverflowError:
        if printed:  # it doubles with every local step; the paper's condition then certifies nothing
            return math.inf
        raise UsageError(
            f"{K} local steps with the rate {eta_L:g} and L = {L:g} may drift apart by more than a number can hold, so nothing can be "
            "certified; lower the local learning rate or the number of local steps"
        ) from None


def psi(L: float, K: int = 1, eta_L: float = 0.0) -> float:
    """psi_K = mean over k < K of (1 + eta_L L)^(2k), the factor by which K local steps can amplify the noise of the mean update."""
    a = number("eta_L", eta_L, low=0) * smoothness(L)
    return float(np.mean((1 + a) ** (2 * np.arange(integer("K", K)))))


def largest_c(
    L: float, N: int, tau_max: int, horizon: int, beta: float = 1.0, nu: float | None = None, K: int = 1, eta_L: float = 0.0
) -> float:
    """Lemma 6: the largest c for which eta_t = c |S_t| / (t + beta) satisfies (lr-1) and (*) in every round before the horizon.

    In round t the condition is A_t c^2 + L N c <= t + beta, so c_t = 2 (t + beta) / (L N + sqrt((L N)^2 + 4 A_t (t + beta))) with
    A_t = 2 phi_K tau_max N^2 (1 - nu) / (nu (1 - nu (j + beta))), j = min(t + tau_max, T - 1). 1/c_t is convex up to
    t = T - 1 - tau_max and decreases from there, so the smallest c_t is at t = 0 or at that round. nu must be below
    1/(T - 1 + beta), so nu and c depend on the horizon. None selects half of that limit.

    >>> c = largest_c(L=1.0, N=10, tau_max=5, horizon=100, beta=50)
    >>> all_hold = worst_round(c, L=1.0, N=10, tau_max=5, horizon=100, beta=50)[1] >= -1e-9
    >>> fails_above = worst_round(1.001 * c, L=1.0, N=10, tau_max=5, horizon=100, beta=50)[1] < 0
    >>> all_hold, fails_above
    (True, True)
    """
    ends = np.array([0, max(0, integer("horizon", horizon) - 1 - integer("tau_max", tau_max))])
    A = _quadratic(ends, L, N, tau_max, horizon, beta, nu, K, eta_L)
    b, LN = ends + beta, L * N
    return float((2 * b / (LN + np.sqrt(LN**2 + 4 * A * b))).min())


def worst_round(c: float, **given: Any) -> tuple[int, float]:
    """Return the round in which the condition is tightest and its relative margin there; `given` are the arguments of `largest_c`."""
    t = np.arange(given["horizon"])
    A = _quadratic(t, **{"beta": 1.0, "nu": None, "K": 1, "eta_L": 0.0} | given)
    left = 1 - (A * number("c", c, low=0, open_low=True) ** 2 + given["L"] * given["N"] * c) / (t + given.get("beta", 1.0))
    return int(left.argmin()), float(left.min())


def _quadratic(
    t: np.ndarray, L: float, N: int, tau_max: int, horizon: int, beta: float, nu: float | None, K: int, eta_L: float
) -> np.ndarray:
    integer("N", N), integer("tau_max", tau_max), number("beta", beta, low=0, open_low=True)
    limit = 1 / (integer("horizon", horizon) - 1 + beta)
    nu = limit / 2 if nu is None else number("nu", nu, low=0, open_low=True)
    if nu >= limit or nu >= 1:
        raise UsageError(
            f"nu={nu:g} is too large: with horizon {horizon} and beta {beta:g} it must be below 1/(horizon - 1 + beta) = {limit:.3g}"
        )
    j = np.minimum(t + tau_max, horizon - 1)
    return np.asarray(2 * varphi(L, K, eta_L) * tau_max * N**2 * (1 - nu) / (nu * (1 - nu * (j + beta))))


def printed_c(L: float, N: int, tau_max: int, horizon: int, beta: float, nu: float, K: int = 1, eta_L: float = 0.0) -> float:
    """Lemma 6 as printed: the smallest (sqrt(B_t^2 + 4 A_t C_t) - B_t) / (2 A_t) over all t. Its (lr-2) does not follow from the proof."""
    s = np.arange(integer("horizon", horizon)) + number("beta", beta, low=0, open_low=True)
    number("nu", nu, low=0, high=1, open_low=True)
    A = varphi(L, K, eta_L, printed=True) * tau_max * N**2 * ((1 - nu) * s + 1)
    B, C = nu * L * N * s**2, nu * s**3
    return float(((np.sqrt(B**2 + 4 * A * C) - B) / (2 * A)).min())


# -- the conditions for the rates and the schedule of a run ------------------------------------------------------


def has(rounds: Rounds, L: float) -> np.ndarray:
    """Return the left side of (*), [T]: 1/(2 eta_t) - L/2."""
    return np.asarray(1 / (2 * rounds.eta) - smoothness(L) / 2)


def weight(rounds: Rounds, nu: float) -> np.ndarray:
    """Return x_j (1 + 1/alpha_j) for every round j, [T]; 0 for the first round and infinite where alpha_j <= 0."""
    grown = rounds.rho * (1 - nu)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.concatenate([[0.0], np.where(grown > 1, rounds.x[1:] * grown / np.maximum(grown - 1, 0), np.inf)])


def needs(rounds: Rounds, nu: float, phi: float, tau_max: int | None = None) -> np.ndarray:
    """Return the right side of (*), [T]: for the gaps of this schedule, or for any schedule with gaps of at most `tau_max`."""
    heavy = weight(rounds, nu)
    if tau_max is not None:
        later = [heavy[t + 1 : t + 1 + tau_max].max(initial=0.0) for t in range(rounds.T)]
        return np.asarray(phi * rounds.N * tau_max / nu * np.array(later))
    t, _, before = rounds.returns
    each = heavy[t] * (t - before)
    if np.isinf(each).any():  # a difference of infinities would be nan
        return np.where(np.arange(rounds.T) < t[np.isinf(each)].max(initial=-1), np.inf, 0.0)
    steps = np.bincount(before, weights=each, minlength=rounds.T) - np.bincount(t, weights=each, minlength=rounds.T)
    return np.asarray(phi / nu * np.maximum(np.cumsum(steps), 0.0))


def choices_of_nu(rounds: Rounds) -> list[float]:
    """Return candidates for nu below 1 - 1/rho_t; an empty list if some rho_t <= 1."""
    limit = 1 - 1 / float(rounds.rho.min()) if rounds.T > 1 else 1.0
    return [float(limit * share) for share in SEARCH] if limit > 1e-12 else []


def best_nu(rounds: Rounds, L: float, phi: float, tau_max: int | None = None) -> float | None:
    """Return the nu for which (*) is closest to holding in its worst round; None if some rho_t <= 1, which leaves no valid nu."""
    left = has(rounds, L)
    scale = np.where(left > 0, left, 1.0)  # where eta_t > 1/L, (*) cannot hold for any nu
    worst = {nu: float((needs(rounds, nu, phi, tau_max) / scale).max()) for nu in choices_of_nu(rounds)}
    return min(worst, key=worst.__getitem__, default=None)


def gap_bound(p_min: float, N: int, horizon: int, delta: float) -> int:
    """Return the tau that no gap exceeds with probability 1 - delta if clients participate independently with probability >= p_min.

    tau(t, i) > s requires s consecutive absences, with probability at most (1 - p_min)^s; the union bound has N T such events. The
    paper's form, lambda/min_i p_t^i (log(N t / delta) + 1), does not specify lambda (and omits it in Theorem 3), and uses the
    probability of round t although those of the previous rounds matter.
    """
    p_min, delta = number("p_min", p_min, low=0, high=1, open_low=True), number("delta", delta, low=0, high=1, open_low=True)
    if p_min == 1:
        return 1
    return max(1, math.ceil(math.log(integer("N", N) * integer("horizon", horizon) / delta) / -math.log1p(-p_min)))


def smoothness(L: Any) -> float:
    return number("the smoothness L", L, low=0, open_low=True)
