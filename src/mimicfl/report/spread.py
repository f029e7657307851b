"""Means with their standard deviations, and differences with their signs."""

import math
import statistics
from collections.abc import Sequence


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation; the latter is None for fewer than two values."""
    if not values:
        return math.nan, None
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def signed(points: float) -> str:
    """`+1.0` or `−1.0`, with a true minus sign; a value that rounds to zero is `+0.0`."""
    return f"{'−' if round(points, 1) < 0 else '+'}{abs(points):.1f}"
