"""The schedule of a run as used in the proofs: rates eta_t, active sets S_t and gaps tau(t, i), without the empty rounds.

Nothing changes in an empty round, so the proofs also hold if empty rounds are removed and the others renumbered. This can only make
gaps smaller.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import UsageError


@dataclass(frozen=True)
class Rounds:
    """The rates and active clients of a run: `eta` [T] in units of the mean gradient, `active` bool [T, N]."""

    eta: np.ndarray
    active: np.ndarray
    number: np.ndarray = field(init=False)  # [T] the original round numbers, for display

    def __post_init__(self) -> None:
        active = np.asarray(self.active, dtype=bool)
        eta = values("the rates", self.eta, above_zero=True)
        if active.ndim != 2 or not active.any():
            raise UsageError(f"the schedule must be [rounds, clients] with at least one active client, got shape {active.shape}")
        if len(eta) < len(active):
            raise UsageError(f"the rates end after {len(eta)} rounds but the run has {len(active)}: give a rate for every round")
        kept = active.any(axis=1)
        object.__setattr__(self, "eta", eta[: len(active)][kept])
        object.__setattr__(self, "active", active[kept])
        object.__setattr__(self, "number", np.flatnonzero(kept))

    @property
    def T(self) -> int:
        return len(self.eta)

    @property
    def N(self) -> int:
        return int(self.active.shape[1])

    @cached_property
    def m(self) -> np.ndarray:
        """|S_t|, [T]."""
        return np.asarray(self.active.sum(axis=1))

    @cached_property
    def x(self) -> np.ndarray:
        """eta_t / |S_t|, [T], which must decrease in the proof of Theorem 2."""
        return np.asarray(self.eta / self.m)

    @cached_property
    def rho(self) -> np.ndarray:
        """rho_t = x_t / x_{t+1}, [T - 1], equation (lr-1)."""
        return np.asarray(self.x[:-1] / self.x[1:])

    @cached_property
    def returns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For every return of a client: the round t, the client i, and the round t - tau(t, i) of its previous participation."""
        client, t = np.nonzero(self.active.T)  # sorted by client, then by round
        again = np.flatnonzero(np.diff(client) == 0) + 1
        return t[again], client[again], t[again - 1]

    @cached_property
    def first(self) -> np.ndarray:
        """Whether client i participates for the first time in round t, bool [T, N]."""
        return np.asarray(self.active & (self.active.cumsum(axis=0) == 1))

    @property
    def tau_max(self) -> int:
        """The largest gap tau(t, i) of clients that return, at least 1."""
        t, _, before = self.returns
        return int((t - before).max(initial=1))

    @cached_property
    def groups(self) -> list[list[int]]:
        """Groups of clients that are connected by rounds, after the first one, in which they participate together."""
        circle = np.arange(self.N)
        for row in self.active[1:]:
            joined = np.unique(circle[row])
            circle[np.isin(circle, joined)] = joined[0] if len(joined) else 0
        active = self.active[1:].any(axis=0)
        return [np.flatnonzero((circle == k) & active).tolist() for k in np.unique(circle[active])]

    def over_active(self, weight: np.ndarray) -> np.ndarray:
        """Return 1/|S_t| times the sum of `weight` over the returning clients of each round, [T]; `weight` has one entry per return."""
        return np.asarray(np.bincount(self.returns[0], weights=weight, minlength=self.T) / self.m)

    def head(self, rounds: int) -> "Rounds":
        """Return the first rounds."""
        return Rounds(self.eta[:rounds], self.active[:rounds])


def values(what: str, given: Any, *, above_zero: bool = False) -> np.ndarray:
    """Convert to an array of finite numbers that are not negative, or positive if `above_zero`."""
    try:
        found = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"{what} must be numbers, got {given!r}") from None
    bad = ~np.isfinite(found) | (found <= 0 if above_zero else found < 0)
    if bad.any():
        where = f" in round {int(np.argmax(bad))}" if found.ndim == 1 else ""
        raise UsageError(f"{what} must be finite and {'above 0' if above_zero else 'not negative'}, got {found[bad].flat[0]:g}{where}")
    return found
