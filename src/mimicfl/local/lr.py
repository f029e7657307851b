"""Learning rates as functions of the round t (from 0) and the number of active clients |S_t|.

>>> from mimicfl import lr
>>> rate = lr.geometric(0.01, 0.95)
>>> rate(0), round(rate(1), 6)
(0.01, 0.0095)
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ..errors import UsageError, number
from ..registry import Registry

Schedule = Callable[[int, int], float]
RATES: Registry[Any] = Registry("learning rate")


@RATES.register("constant")
@dataclass(frozen=True)
class constant:
    """eta_t = rate."""

    rate: float

    def __post_init__(self) -> None:
        number("rate", self.rate, low=0, high=1e30, open_low=True)

    def __call__(self, t: int, active: int = 1) -> float:
        return float(self.rate)


@RATES.register("geometric")
@dataclass(frozen=True)
class geometric:
    """eta_t = max(rate * decay^t, floor); the paper's Table II is geometric(0.01, 0.95) and (0.01, 0.99)."""

    rate: float
    decay: float
    floor: float = 0.0

    def __post_init__(self) -> None:
        number("rate", self.rate, low=0, high=1e30, open_low=True)
        number("decay", self.decay, low=0, high=1, open_low=True)
        number("floor", self.floor, low=0)

    def __call__(self, t: int, active: int = 1) -> float:
        return float(max(self.rate * self.decay**t, self.floor))


@RATES.register("theory")
@dataclass(frozen=True)
class theory:
    """eta_t = c |S_t| / (t + beta), the form under which the paper proves convergence."""

    c: float
    beta: float = 1.0

    def __post_init__(self) -> None:
        number("c", self.c, low=0, open_low=True)
        number("beta", self.beta, low=0, open_low=True)

    def __call__(self, t: int, active: int = 1) -> float:
        return float(self.c * active / (t + self.beta))


def schedule(rate: Any) -> Schedule:
    """A number, a text such as `geometric:0.01,0.95`, or any callable of t (or of t and |S_t|), as a schedule."""
    if isinstance(rate, str):
        try:
            rate = float(rate)
        except ValueError:
            return RATES.make(rate)  # type: ignore[no-any-return]
    if isinstance(rate, Real):
        return constant(float(rate))
    if not callable(rate):
        raise UsageError(f"a learning rate is a number, a text such as geometric:0.01,0.95 or a function of the round, got {rate!r}")
    if type(rate) in RATES.factories.values():
        return rate  # type: ignore[no-any-return]
    return Own(rate, _takes_two(rate))


@dataclass(frozen=True)
class Own:
    """A user's function as a schedule, its values checked."""

    rate: Callable[..., Any]
    takes_active: bool

    def __call__(self, t: int, active: int = 1) -> float:
        value = self.rate(t, active) if self.takes_active else self.rate(t)
        try:
            found = float(value)
        except (TypeError, ValueError):
            raise UsageError(f"the learning rate function gave {value!r} for round {t}: it must give a number") from None
        return number(f"the learning rate of round {t}", found, low=0, high=1e30, open_low=True)


def _takes_two(rate: Callable[..., Any]) -> bool:
    """Does the function want |S_t| too? Parameters with defaults of their own do not count."""
    try:
        parameters = inspect.signature(rate).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters) >= 2
