"""Tests of paired differences: paired t, sign flips, Holm, equivalence (TOST), Friedman and Nemenyi.

Values are by seed or by cell: two algorithms under one seed share the split, the schedule, the initial model and the batches.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

LEVEL = 0.05
YES, TIE, NO, UNDECIDED, FEW, OPEN = "yes", "tie", "no", "undecided", "one seed only", "not run yet"  # what a difference shows
MOST_EXACT = 20  # differences: 2^20 sign patterns are enumerated, for more a sample of DRAWS is used
DRAWS = 200_000
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Paired:
    """A mean paired difference with its standard error, and what follows from Student's t distribution.

    Equal differences (`error` is 0) are no proof: accuracies are counts, and a lead of one test sample may repeat by chance. Their p value
    is that of sign flips. With fewer than two pairs nothing can be tested (p is 1).
    """

    mean: float
    error: float  # infinite with fewer than two pairs
    pairs: int
    degrees: float = 0.0  # degrees of freedom of the t distribution
    ahead: int = 0  # number of positive differences

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Paired":
        """The test of these differences.

        >>> found = Paired.of([1.0, 2.0, 3.0])
        >>> found.mean, round(found.error, 3), round(found.p, 4)
        (2.0, 0.577, 0.0742)
        """
        n = len(differences)
        mean = float(np.mean(differences)) if n else math.nan
        error = float(np.std(differences, ddof=1)) / math.sqrt(n) if n > 1 else math.inf
        if error <= 1e-12 * abs(mean):  # equal differences, up to rounding
            error = 0.0
        return cls(mean, error, n, n - 1.0, sum(d > 0 for d in differences))

    @classmethod
    def between(cls, left: Mapping[Name, float], right: Mapping[Name, float]) -> "Paired":
        """The test of `left - right` over the keys (seeds) that both have."""
        return cls.of([left[key] - right[key] for key in left if key in right])

    @classmethod
    def welch(cls, left: tuple[float, float, int], right: tuple[float, float, int]) -> "Paired":
        """Two independent samples, each given by its mean, standard deviation and size (Welch-Satterthwaite)."""
        parts = [std**2 / n for _, std, n in (left, right)]
        error = math.sqrt(sum(parts))
        degrees = sum(parts) ** 2 / sum(part**2 / (n - 1) for part, (_, _, n) in zip(parts, (left, right), strict=True)) if error else 1.0
        return cls(left[0] - right[0], error, min(left[2], right[2]), degrees)

    @property
    def p(self) -> float:
        """Two-sided p value of the hypothesis that the true difference is zero."""
        if self.pairs > 1 and self.error == 0 and self.mean:
            return 2.0 ** (1 - self.pairs)
        return min(1.0, 2 * min(self.above(0.0), self.below(0.0))) if self.pairs > 1 else 1.0

    def above(self, bound: float) -> float:
        """One-sided p value against the hypothesis that the true difference is at most `bound`."""
        return self._tail(self.mean - bound)

    def below(self, bound: float) -> float:
        """One-sided p value against the hypothesis that the true difference is at least `bound`."""
        return self._tail(bound - self.mean)

    def equivalence(self, margin: float) -> float:
        """p value of the two one-sided tests (TOST): small if the true difference is within ± `margin`."""
        return max(self.above(-margin), self.below(margin)) if self.pairs > 1 else 1.0

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The confidence interval of the true difference, 95 % by default."""
        if self.pairs < 2:
            return -math.inf, math.inf
        half = t_quantile(1 - level / 2, self.degrees) * self.error
        return self.mean - half, self.mean + half

    def _tail(self, distance: float) -> float:
        if self.pairs < 2:
            return 1.0
        if self.error == 0:
            return 0.0 if distance > 0 else 1.0
        return 1 - t_cdf(distance / self.error, self.degrees)


def outcome(found: Paired, adjusted: float, margin: float | None) -> str:
    """What a difference shows: YES or NO if it is positive or negative, TIE if it is within ± `margin`, else UNDECIDED.

    `adjusted` is the p value after Holm. FEW with a single pair, OPEN without any.

    >>> outcome(Paired.of([0.1, -0.1, 0.05, 0.0, -0.05]), 1.0, margin=1.0)
    'tie'
    """
    if found.pairs < 2:
        return FEW if found.pairs else OPEN
    if adjusted < LEVEL:
        return YES if found.mean > 0 else NO
    return TIE if margin is not None and found.equivalence(margin) < LEVEL else UNDECIDED


def sign_flips(differences: Sequence[float]) -> float:
    """Two-sided permutation test of the mean: every difference may have had either sign. Exact for up to MOST_EXACT differences.

    >>> sign_flips([1.0, 2.0, 3.0])
    0.25
    """
    d = np.asarray(differences, dtype=np.float64)
    found = abs(d.sum()) - 1e-9 * np.abs(d).sum()  # rounding must not make an equal sum smaller
    if found <= 0:
        return 1.0
    if len(d) <= MOST_EXACT:
        # Every sum is one of the first half of the differences and one of the second; as many are at least `found` as at most -found.
        first, second = _signed_sums(d[: len(d) // 2]), np.sort(_signed_sums(d[len(d) // 2 :]))
        as_large = len(first) * len(second) - int(np.searchsorted(second, found - first).sum())
        return float(2 * as_large / 2 ** len(d))
    signs = np.random.default_rng(0).integers(0, 2, (DRAWS - 1, len(d)), dtype=np.int8) * 2 - 1
    sums = np.concatenate([[d.sum()], signs @ d])
    return float(np.mean(np.abs(sums) >= found))


def _signed_sums(values: np.ndarray) -> np.ndarray:
    """The sums of these values with all signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def holm(p_values: Mapping[Name, float], of: int | None = None) -> dict[Name, float]:
    """p values adjusted for testing all of these hypotheses (Holm, 1979), or `of` hypotheses, of which these are some.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'b': 0.06, 'c': 0.06}
    """
    adjusted: dict[Name, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, ((of or len(p_values)) - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


@dataclass(frozen=True)
class Ranking:
    """Mean ranks of algorithms over cells (1 is best), with Friedman's test and Nemenyi's critical difference."""

    ranks: dict[str, float]  # best first
    cells: int
    p: float  # Friedman: all algorithms are equally good
    critical: float  # two mean ranks that differ by more are significantly different at the level 0.05

    def groups(self) -> list[list[str]]:
        """Maximal sets of algorithms that the test does not distinguish, best first: the bars of a critical-difference diagram."""
        names, found = list(self.ranks), list[list[str]]()
        for k, first in enumerate(names):
            last = max(j for j, name in enumerate(names) if self.ranks[name] - self.ranks[first] <= self.critical)
            if last > k and not any(names[last] in group for group in found):
                found.append(names[k : last + 1])
        return found


def friedman(table: Mapping[str, Sequence[float]]) -> Ranking:
    """Rank algorithms within each cell (higher values are better, equal values share their ranks) and test the mean ranks.

    The statistic is corrected for ties. The chi-squared approximation needs about ten cells or five algorithms.
    """
    names, values = list(table), np.array([list(row) for row in table.values()], dtype=np.float64).T  # [cells, algorithms]
    n, k = values.shape
    ranks = np.array([_ranks(-row) for row in values])
    means = ranks.mean(axis=0)
    spread = float(((ranks - (k + 1) / 2) ** 2).sum())
    statistic = n**2 * (k - 1) * float(((means - (k + 1) / 2) ** 2).sum()) / spread if spread else 0.0
    order = np.argsort(means, kind="stable")
    critical = nemenyi_quantile(k) * math.sqrt(k * (k + 1) / (6 * n))
    return Ranking({names[j]: float(means[j]) for j in order}, n, chi2_tail(statistic, k - 1), critical)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, the smallest first; equal values share the mean of their ranks."""
    return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])


def nemenyi_quantile(algorithms: int, level: float = LEVEL) -> float:
    """The upper quantile of the studentized range of this many normal variables, divided by sqrt(2).

    >>> round(nemenyi_quantile(5), 3)
    2.728
    """
    z = torch.linspace(-9.0, 9.0, 4001, dtype=torch.float64)
    density = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

    def within(q: float) -> float:
        cover = torch.special.ndtr(z) - torch.special.ndtr(z - q)
        return algorithms * float(torch.trapezoid(density * cover ** (algorithms - 1), z))

    return _bisect(lambda q: within(q) - (1 - level), 0.0, 20.0) / math.sqrt(2)


def t_cdf(t: float, degrees: float) -> float:
    """Student's t distribution function.

    >>> round(t_cdf(4.302653, 2), 6)
    0.975
    """
    tail = _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t)) / 2
    return 1 - tail if t > 0 else tail


def t_quantile(probability: float, degrees: float) -> float:
    """The inverse of `t_cdf`, for probabilities of at least one half."""
    top = 1.0
    while t_cdf(top, degrees) < probability:
        top *= 2
    return _bisect(lambda t: t_cdf(t, degrees) - probability, 0.0, top)


def chi2_tail(value: float, degrees: int) -> float:
    """The probability that a chi-squared variable exceeds the value."""
    half = torch.tensor([degrees / 2, value / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """The root of an increasing function."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by Lentz's continued fraction."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    result = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a - 1 + 2 * m) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 1 + 2 * m))
        for term in (even, odd):
            c, d = 1 + term / c, 1 / (1 + term * d)
            result *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * result
