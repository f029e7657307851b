"""Learning rates as functions of the round t (starting at 0) and the number of active clients |S_t|.

>>> from mimicfl import lr
>>> rate = lr.geometric(0.01, 0.95)
>>> rate(0), round(rate(1), 6)
(0.01, 0.0095)
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ..errors import UsageError, integer, number, shown
from ..registry import Registry
from ..theory.rates import largest_c
from ..theory.rounds import Rounds

Schedule = Callable[[int, int], float]
RATES: Registry[Any] = Registry(
    "learning rate",
    ("lr", "global_lr"),
    lambda thing: type(thing) in RATES.factories.values(),
    "a number, a string such as geometric:0.01,0.95 or one of mimicfl.lr in settings (simulate takes a function of the round as well)",
)

register = RATES.register


@register("constant")
@dataclass(frozen=True)
class constant:
    """eta_t = rate."""

    rate: float

    def __post_init__(self) -> None:
        number("the learning rate", self.rate, low=0, high=1e30, open_low=True)

    def __call__(self, t: int, active: int = 1) -> float:
        return float(self.rate)


@register("geometric")
@dataclass(frozen=True)
class geometric:
    """eta_t = max(rate * decay^t, floor); the paper's Table II uses geometric(0.01, 0.95) and geometric(0.01, 0.99)."""

    rate: float
    decay: float
    floor: float = 0.0

    def __post_init__(self) -> None:
        number("the learning rate", self.rate, low=0, high=1e30, open_low=True)
        number("decay", self.decay, low=0, high=1, open_low=True)
        number("floor", self.floor, low=0)

    def __call__(self, t: int, active: int = 1) -> float:
        return float(max(self.rate * self.decay**t, self.floor))


@register("theory")
@dataclass(frozen=True)
class theory:
    """eta_t = c |S_t| / (t + beta), the form of the paper's Lemma 6.

    Give c, or give the constants L, N, tau_max and the horizon T (for K > 1 local steps also K and eta_L). Without c, the largest value
    for which Theorem 2 holds up to the horizon is used, see `mimicfl.theory.rates.largest_c`; a given c is checked against it. This
    assumes `update="mean"`; with "sum" an update is K times as long, so divide c by K.
    """

    c: float | None = None
    beta: float = 1.0
    L: float | None = None
    N: int | None = None
    tau_max: int | None = None
    horizon: int | None = None
    nu: float | None = None
    K: int = 1
    eta_L: float | None = None

    def __post_init__(self) -> None:
        number("beta", self.beta, low=0, open_low=True)
        integer("K", self.K)
        if self.nu is not None:
            number("nu", self.nu, low=0, open_low=True)
        if self.eta_L is not None:
            number("eta_L", self.eta_L, low=0)
        if self.c is not None:
            number("c", self.c, low=0, open_low=True)
        if any(value is not None for value in (self.L, self.N, self.tau_max, self.horizon)):
            most = self._largest()
            if self.c is not None and self.c > most * (1 + 1e-9):
                raise UsageError(f"c={self.c:g} is above the largest with a certificate for these constants, {most:.6g}: omit c")
            object.__setattr__(self, "c", most if self.c is None else self.c)
        elif self.c is None:
            raise UsageError("the theory rate needs c, or the constants L, N, tau_max and horizon to find it")

    def _largest(self) -> float:
        needed = {"L": self.L, "N": self.N, "tau_max": self.tau_max, "horizon": self.horizon} | (
            {"eta_L": self.eta_L} if self.K != 1 else {}
        )
        if missing := [name for name, value in needed.items() if value is None]:
            raise UsageError(f"to find c for the theory rate, {missing[0]} is missing; give {missing[0]}, or c itself")
        assert self.L is not None
        assert self.N is not None
        assert self.tau_max is not None
        assert self.horizon is not None
        return largest_c(self.L, self.N, self.tau_max, self.horizon, self.beta, self.nu, self.K, self.eta_L or 0.0)

    def __call__(self, t: int, active: int = 1) -> float:
        assert self.c is not None
        return float(self.c * active / (t + self.beta))


def schedule(rate: Any) -> Schedule:
    """Convert a number, a string such as `geometric:0.01,0.95`, or a function of t (or of t and |S_t|) to a schedule."""
    if isinstance(rate, str):
        try:
            rate = float(rate)
        except ValueError:
            rate = RATES.make(rate)
    if isinstance(rate, Real) and not isinstance(rate, bool):
        return constant(number("the learning rate", rate))
    if not callable(rate) or isinstance(rate, type):
        raise UsageError(
            f"a learning rate must be a number, a string such as geometric:0.01,0.95 or a function of the round, got {shown(rate)}"
        )
    if type(rate) in (constant, geometric, theory):
        return rate  # type: ignore[no-any-return]
    return Own(rate, _takes_active(rate))


def check_certificate(rate: Schedule, rounds: Rounds, steps: int, local: float, update: str) -> None:
    """Raise a `UsageError` if a run exceeds the constants from which its theory rate was computed. `local` is the largest local rate."""
    if not isinstance(rate, theory) or rate.horizon is None:
        return
    assert rate.N is not None
    assert rate.tau_max is not None
    length = int(rounds.number[-1]) + 1
    facts = [("horizon", rate.horizon, length), ("N", rate.N, rounds.N), ("tau_max", rate.tau_max, rounds.tau_max), ("K", rate.K, steps)]
    for name, given, found in [*facts, *([("eta_L", rate.eta_L or 0.0, local)] if steps > 1 else [])]:
        if given < found:
            raise UsageError(f"the theory rate was computed for {name}={given:g}, but this run has {found:g}: set {name}={found:g}")
    if update == "sum" and steps > 1:
        raise UsageError("the theory rate assumes update='mean': use it, or give only c, divided by the number of local steps")


@dataclass(frozen=True)
class Own:
    """A schedule from a user's function; checks every value that it returns."""

    rate: Callable[..., Any]
    takes_active: bool

    def __call__(self, t: int, active: int = 1) -> float:
        value = self.rate(t, active) if self.takes_active else self.rate(t)
        try:
            found = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
        except Exception:  # not a number, or a tensor with several elements
            found = math.nan
        if math.isnan(found):
            raise UsageError(f"the learning rate function must return a number, got {shown(value)} in round {t}")
        return number(f"the learning rate of round {t}", found, low=0, high=1e30, open_low=True)


def _takes_active(rate: Callable[..., Any]) -> bool:
    """Return whether the function has a second parameter, for |S_t|. Parameters with defaults do not count."""
    try:
        parameters = inspect.signature(rate).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters) >= 2
