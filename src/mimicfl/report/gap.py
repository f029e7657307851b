"""A difference between two sets of runs, and how much of it may be chance."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

YES, TIE, NO, FEW, OPEN = "yes", "within chance", "no", "one seed only", "not run yet"


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation; of a single value no spread is known."""
    if not values:
        return math.nan, None
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def signed(points: float) -> str:
    """`+1.0` or `−1.0`, with a minus as wide as the plus; what rounds to nothing is `+0.0`."""
    return f"{'−' if round(points, 1) < 0 else '+'}{abs(points):.1f}"


@dataclass(frozen=True)
class Gap:
    """A difference and its standard error, seed by seed: what is compared shares a seed's split, schedule and first model."""

    points: float
    error: float  # infinite where one seed says nothing of chance
    seeds: int
    ahead: int = 0  # in how many of them it is above zero

    @classmethod
    def of(cls, left: Mapping[int, float], right: Mapping[int, float]) -> "Gap":
        pairs = [left[seed] - right[seed] for seed in left if seed in right]
        mean, std = mean_std(pairs)
        return cls(mean, math.inf if std is None else std / math.sqrt(len(pairs)), len(pairs), sum(d > 0 for d in pairs))

    @property
    def outcome(self) -> str:
        """YES where it is above zero beyond its error, NO where below."""
        if self.seeds < 2:
            return FEW if self.seeds else OPEN
        # Of two seeds, one level and one ahead, the mean is the error itself: rounding must not make a lead of it.
        return TIE if abs(self.points) <= self.error * (1 + 1e-9) else YES if self.points > 0 else NO

    def __str__(self) -> str:
        return signed(self.points) + (f" ± {self.error:.1f}" if math.isfinite(self.error) else "")
