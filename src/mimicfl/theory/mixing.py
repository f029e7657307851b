"""A certificate for MimiC that does not require decreasing rates, based on how fast the clients' memories mix.

Not in the paper. Let u_i be the direction v of the last round in which client i participated, and y_i its update in that round, so
that c_i = u_i - y_i. A round replaces the u_i of S_t by the mean of u_i + g_i - y_i: U_t = P_t (U_{t-1} + D_t), where P_t averages
over S_t and row i of D_t is g_i(w_t) - g_i(w_t'), at most l |w_t - w_t'|. P_t preserves the mean of the rows, which is therefore
always the mean of the y_i (MIFA's direction), and reduces deviations from it: pi(t, s) = |P_t ... P_s (I - 11^T/N)| is the share of
a deviation of round s that remains in round t. With z_r = eta_r |v_r| this gives

    |v_t - mean_i g_i(w_t)|  <=  l sum_r M_tr z_r,
    M_tr = |S_t|^(-1/2) sum_s pi(t, s) n_sr^(1/2) + (1/N) #{i not in S_t, last active in round r or earlier},
    n_sr = #{i in S_s, last active before s in round r or earlier}.

Inserted into Lemma 1: if q is the spectral norm of diag(eta)^(1/2) M diag(eta)^(1/2) and (1 + [K > 1]) l^2 q^2 <= 1 - L max eta, then

    sum_t eta_t |grad f(w_t)|^2  <=  2 Delta + 2 [K > 1] sum_t eta_t |mean_i g_i(w_t) - grad f(w_t)|^2.

For constant rates the bound decreases like 1/T as long as |M| does not grow with T, that is, as long as the clients mix. If they form
groups that never participate together, pi stays 1, |M| grows, and MimiC may indeed converge to a wrong point. The certificate assumes
that there is no noise and that all clients participate in the first round.
"""

import functools
import math
from typing import Any

import numpy as np

from ..errors import UsageError, number
from .rates import smoothness, varphi
from .rounds import Rounds, values

MOST_WORK = 1e10  # multiplications; a few seconds
FADED = 1e-6  # a deviation reduced to this share is not tracked further; its last value is used from then on


def mixing(rounds: Rounds) -> np.ndarray:
    """Return the matrix M of this schedule, [T, T]; it does not depend on rates or losses."""
    T, N = rounds.active.shape
    if not rounds.active[0].all():
        raise UsageError("the mixing bound needs all clients in round 0: add warm_start=true to the availability")
    if T**2 / 2 * (N**3 + T) > MOST_WORK:
        raise UsageError(f"{T} rounds of {N} clients are too many for the mixing certificate: use a shorter run")
    return _mixing(np.ascontiguousarray(rounds.active).tobytes(), T, N)


@functools.lru_cache(maxsize=4)  # a report uses the same schedule several times
def _mixing(schedule: bytes, T: int, N: int) -> np.ndarray:
    active = np.frombuffer(schedule, dtype=bool).reshape(T, N)
    last = np.maximum.accumulate(np.where(active, np.arange(T)[:, None], -1), axis=0)  # last round up to t with client i
    n, unseen = np.zeros((T, T)), np.zeros((T, T))
    for t in range(1, T):
        n[t, :t] = np.searchsorted(np.sort(last[t - 1][active[t]]), np.arange(t), side="right")
        unseen[t, :t] = np.searchsorted(np.sort(last[t][~active[t]]), np.arange(t), side="right") / N
    return np.asarray(_memories(active) @ np.sqrt(n) / np.sqrt(active.sum(axis=1))[:, None] + unseen)


def _memories(active: np.ndarray) -> np.ndarray:
    """pi(t, s), [T, T], zero above the diagonal."""
    T, N = active.shape
    pi = np.zeros((T, T))
    products, begun = np.empty((0, N, N)), np.empty(0, dtype=int)  # P_t ... P_s (I - 11^T/N) for the rounds s still tracked
    centre = np.eye(N) - 1 / N
    for t in range(T):
        P = np.eye(N)
        P[np.ix_(active[t], active[t])] = 1 / active[t].sum()
        pi[t] = pi[t - 1] if t else 0.0  # averaging never increases it
        products, begun = np.concatenate([P @ products, (P @ centre)[None]]), np.append(begun, t)
        pi[t, t] = 1.0
        if t % (1 + N // 20):  # with many clients, reuse the norm of an earlier round, which is an upper bound
            continue
        size = np.sqrt(np.maximum(np.linalg.eigvalsh(products.transpose(0, 2, 1) @ products)[:, -1], 0.0))
        pi[t, begun] = np.where(size > 1e-12, size, 0.0)
        products, begun = products[size > FADED], begun[size > FADED]
    return pi


def strength(rounds: Rounds, M: np.ndarray | None = None) -> float:
    """Return q, the spectral norm of diag(eta)^(1/2) M diag(eta)^(1/2)."""
    root = np.sqrt(rounds.eta)
    return float(np.linalg.norm(root[:, None] * (mixing(rounds) if M is None else M) * root, 2))


def room(rounds: Rounds, L: float, K: int = 1, eta_L: float = 0.0, M: np.ndarray | None = None) -> float:
    """Return the margin of the condition, 1 - L max eta - (1 + [K > 1]) l^2 q^2. The run is certified if it is not negative."""
    l2 = varphi(smoothness(L), K, eta_L) - L**2  # the updates' Lipschitz constant, squared
    return 1 - L * float(rounds.eta.max()) - (1 + (K > 1)) * l2 * strength(rounds, M) ** 2


def certified_rounds(rounds: Rounds, L: float, K: int = 1, eta_L: float = 0.0) -> int:
    """Return how many rounds, from the first on, the certificate covers. Bisection works because q never decreases with the horizon."""
    M = mixing(rounds)
    low, high = 0, rounds.T
    while low < high:
        n = (low + high + 1) // 2
        low, high = (n, high) if room(rounds.head(n), L, K, eta_L, M[:n, :n]) >= -1e-9 else (low, n - 1)
    return low


def largest_constant(rounds: Rounds, L: float, K: int = 1, eta_L: float = 0.0) -> float:
    """Return the largest certified constant rate for this schedule: the root of (1 + [K > 1]) l^2 |M|^2 eta^2 + L eta = 1."""
    a = (1 + (K > 1)) * (varphi(smoothness(L), K, eta_L) - L**2) * float(np.linalg.norm(mixing(rounds), 2)) ** 2
    return 2 / (L + math.sqrt(L**2 + 4 * a))


def mixing_bound(rounds: Rounds, Delta: float, L: float, drift: Any = 0.0, K: int = 1, eta_L: float = 0.0) -> np.ndarray:
    """Upper bound on the weighted mean of the squared gradient norms, for every horizon; infinite if the run is not certified.

    `drift` is |mean_i g_i(w_t) - grad f(w_t)|^2 over all clients, the bias caused by K > 1 local steps.
    """
    Delta, drift = number("Delta", Delta, low=0), np.broadcast_to(values("drift", drift), rounds.T)
    if room(rounds, L, K, eta_L) < -1e-9:
        return np.full(rounds.T, np.inf)
    return np.asarray((2 * Delta + (2 * np.cumsum(rounds.eta * drift) if K > 1 else 0.0)) / np.cumsum(rounds.eta))
