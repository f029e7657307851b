"""A schedule as the proofs see it: rates eta_t, active sets S_t and gaps tau(t, i), with the empty rounds left out.

In an empty round nothing moves, so the proofs hold with such rounds struck out and the others counted on; gaps then get
smaller, never larger.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import UsageError


@dataclass(frozen=True)
class Rounds:
    """What happened: `eta` [T] in units of the mean gradient, `available` bool [T, N]."""

    eta: np.ndarray
    available: np.ndarray
    number: np.ndarray = field(init=False)  # [T] the rounds' own numbers, for people

    def __post_init__(self) -> None:
        available = np.asarray(self.available, dtype=bool)
        eta = values("the rates", self.eta, above_zero=True)
        if available.ndim != 2 or not available.any():
            raise UsageError("the schedule must be [rounds, clients] with somebody in it")
        if len(eta) < len(available):
            raise UsageError(f"the rates end after {len(eta)} rounds, the run has {len(available)}: give a rate for every round")
        kept = available.any(axis=1)
        object.__setattr__(self, "eta", eta[: len(available)][kept])
        object.__setattr__(self, "available", available[kept])
        object.__setattr__(self, "number", np.flatnonzero(kept))

    @property
    def T(self) -> int:
        return len(self.eta)

    @property
    def N(self) -> int:
        return int(self.available.shape[1])

    @cached_property
    def m(self) -> np.ndarray:
        """|S_t|, [T]."""
        return np.asarray(self.available.sum(axis=1))

    @cached_property
    def x(self) -> np.ndarray:
        """eta_t / |S_t|, [T]: what the proof of Theorem 2 needs to fall."""
        return np.asarray(self.eta / self.m)

    @cached_property
    def rho(self) -> np.ndarray:
        """rho_t = x_t / x_{t+1}, [T - 1], equation (lr-1)."""
        return np.asarray(self.x[:-1] / self.x[1:])

    @cached_property
    def returns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every time a client comes back: its round t, the client i, and t - tau(t, i), when it was there before."""
        client, t = np.nonzero(self.available.T)  # by client, then by round
        again = np.flatnonzero(np.diff(client) == 0) + 1
        return t[again], client[again], t[again - 1]

    @cached_property
    def first(self) -> np.ndarray:
        """Whether client i is there for the first time in round t, bool [T, N]."""
        return np.asarray(self.available & (self.available.cumsum(axis=0) == 1))

    @property
    def tau_max(self) -> int:
        """The largest tau(t, i) of clients that come back; 1 if nobody was ever away."""
        t, _, before = self.returns
        return int((t - before).max(initial=1))

    @cached_property
    def circles(self) -> list[list[int]]:
        """Clients in circles: whoever was there together after the first round, or is linked by such meetings, shares one."""
        circle = np.arange(self.N)
        for row in self.available[1:]:
            met = np.unique(circle[row])
            circle[np.isin(circle, met)] = met[0] if len(met) else 0
        there = self.available[1:].any(axis=0)
        return [np.flatnonzero((circle == k) & there).tolist() for k in np.unique(circle[there])]

    def over_active(self, weight: np.ndarray) -> np.ndarray:
        """1/|S_t| times the sum over returning clients of `weight`, one entry per return, [T]."""
        return np.asarray(np.bincount(self.returns[0], weights=weight, minlength=self.T) / self.m)

    def head(self, rounds: int) -> "Rounds":
        return Rounds(self.eta[:rounds], self.available[:rounds])


def values(what: str, given: Any, *, above_zero: bool = False) -> np.ndarray:
    """A list of finite numbers that are not negative."""
    try:
        found = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"{what} must be numbers, got {given!r}") from None
    bad = ~np.isfinite(found) | (found <= 0 if above_zero else found < 0)
    if bad.any():
        where = f" in round {int(np.argmax(bad))}" if found.ndim == 1 else ""
        raise UsageError(f"{what} must be finite and {'above 0' if above_zero else 'not negative'}, got {found[bad].flat[0]:g}{where}")
    return found
