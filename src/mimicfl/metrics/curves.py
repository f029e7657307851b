"""Numbers that summarize a curve: the mean over the last tenth of a run, the area under it, the cost until it reaches a target."""

import math
import statistics
from collections.abc import Sequence

from .rows import Row

TAIL = 0.1  # share of the rounds, at the end


def tail_mean(rows: Sequence[Row], metric: str = "test_accuracy", rounds: int | None = None) -> float | None:
    """The mean over the last tenth of the first `rounds` rounds (all by default). The last round alone is noise for runs that oscillate.

    Only evaluated rounds count. If the last tenth has none, the last evaluation before it is used.
    """
    kept = rows[: rounds or len(rows)]
    first = len(kept) - max(1, math.ceil(TAIL * len(kept)))
    tail = [float(row[metric]) for row in kept[first:] if row.get(metric) is not None]
    if tail:
        return statistics.fmean(tail)
    return next((float(row[metric]) for row in reversed(kept) if row.get(metric) is not None), None)


def area(rows: Sequence[Row], metric: str = "test_accuracy") -> float | None:
    """The mean over all evaluated rounds: the area under the curve divided by its length."""
    values = [float(row[metric]) for row in rows if row.get(metric) is not None]
    return statistics.fmean(values) if values else None


def swing(rows: Sequence[Row], metric: str = "test_accuracy") -> float | None:
    """How much the curve oscillates at the end: the standard deviation over the last quarter of the evaluated rounds."""
    values = [float(row[metric]) for row in rows if row.get(metric) is not None]
    tail = values[-max(2, len(values) // 4) :]
    return statistics.pstdev(tail) if len(tail) > 1 else None


def first_to_reach(rows: Sequence[Row], target: float, metric: str = "test_accuracy", rises: bool = True) -> Row | None:
    """The first row whose metric rises (or falls) to the target, or None if the run never reaches it: it is censored at its last round."""
    known = (row for row in rows if row.get(metric) is not None)
    return next((row for row in known if (row[metric] >= target if rises else row[metric] <= target)), None)


def censored_median(reached: Sequence[float], censored: Sequence[float]) -> float | None:
    """The median of times, of which the censored ones are only known to be longer (Kaplan-Meier); None if it exceeds all known times.

    >>> censored_median([3.0, 5.0, 8.0], [10.0]), censored_median([3.0], [10.0, 10.0]), censored_median([5.0, 5.0], [8.0, 9.0])
    (5.0, None, 5.0)
    """
    remaining = 1.0
    for time in sorted(set(reached)):  # runs that reach the target at the same time count together
        remaining *= 1 - sum(other == time for other in reached) / sum(other >= time for other in (*reached, *censored))
        if remaining <= 0.5 + 1e-9:
            return time
    return None
