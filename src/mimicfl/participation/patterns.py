"""Availability patterns: the three of the paper, and others under which algorithms differ most.

A pattern is a frozen dataclass with one method, `draw`, that returns bool [rounds, clients]. Whether a client is available in
round t depends only on the seed and t, not on the number of rounds: a longer run starts with the same rounds as a shorter one.

    >>> from mimicfl.participation import Bounded, schedule
    >>> schedule(Bounded(3), rounds=4, num_clients=3, seed=1).astype(int)
    array([[1, 1, 1],
           [0, 1, 0],
           [0, 1, 0],
           [1, 1, 1]])
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..display import schedule_image
from ..errors import UsageError, flag, integer, one_of, plain, probability, shown
from ..registry import Registry
from ..seeds import stream
from .statistics import observe

PATTERNS: Registry["Pattern"] = Registry(
    "availability",
    ("availability",),
    lambda thing: isinstance(thing, Pattern) or (isinstance(thing, type) and issubclass(thing, Pattern)),
    "a pattern such as TimeVarying(0.1) or a string such as time-varying:0.1",
)
register = PATTERNS.register


@dataclass(frozen=True)
class Pattern:
    """Base class of all patterns. Subclasses define `draw`.

    With `warm_start=True` all clients participate in round 0, as the paper's analysis assumes.
    """

    warm_start: bool = field(default=False, kw_only=True)

    @property
    def needs_labels(self) -> bool:
        """Does `draw` need the clients' class counts?"""
        return False

    @property
    def round_seconds(self) -> float | None:
        """The length of a round in seconds, if the pattern is defined in time; rounds then start at multiples of it."""
        return None

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        """The participation rate of each client in the long run, [num_clients], or None if it is not known."""
        return None

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        """Return the schedule, bool [rounds, num_clients].

        `class_counts` [num_clients, classes] holds the number of samples of each class per client, or is None for regression.
        """
        raise NotImplementedError(f"{type(self).__name__} must define draw(rounds, num_clients, seed, class_counts)")

    def _repr_html_(self) -> str | None:
        """In a notebook: an example schedule; None, for the plain text, if the pattern depends on the clients' labels."""
        try:
            example = schedule(self, *self.example_shape())
        except UsageError:  # it needs what only a run knows, such as the clients' labels
            return None
        return f"<code>{html.escape(repr(self))}</code><br>{schedule_image(example, 'available')}{observe(example)._repr_html_()}"

    def example_shape(self) -> tuple[int, int]:
        """The rounds and clients that a notebook shows."""
        return 100, 30


def schedule(pattern: "Pattern | str", rounds: int, num_clients: int, seed: int = 0, class_counts: np.ndarray | None = None) -> np.ndarray:
    """Draw the schedule of a pattern, bool [rounds, num_clients], and check its shape and type."""
    pattern = make(pattern)
    integer("rounds", rounds), integer("num_clients", num_clients), integer("seed", seed, low=0)
    counts = None if class_counts is None else _counts(class_counts, num_clients)
    try:
        drawn = np.asarray(pattern.draw(rounds, num_clients, seed, counts))
    except MemoryError:
        raise UsageError(
            f"a schedule of {rounds:,} rounds and {num_clients:,} clients does not fit into memory; use fewer rounds or clients"
        ) from None
    if drawn.shape != (rounds, num_clients) or drawn.dtype != bool:
        raise UsageError(
            f"{type(pattern).__name__}.draw gave {drawn.dtype} of shape {drawn.shape}, "
            f"expected bool of shape ({rounds}, {num_clients}): one row per round, one column per client"
        )
    available = drawn.copy()
    if pattern.warm_start:
        available[0] = True
    return available


def _counts(class_counts: Any, num_clients: int) -> np.ndarray:
    try:
        counts = np.array(class_counts)  # a copy: a custom pattern may change it in place
    except Exception:  # the conversion of a custom object may raise anything
        counts = np.empty(0)
    if counts.ndim != 2 or len(counts) != num_clients or counts.dtype.kind not in "iu":
        found = f"{counts.dtype} of shape {counts.shape}"
        raise UsageError(f"class_counts must be whole numbers of shape ({num_clients}, classes), one row per client, got {found}")
    return counts


def make(spec: "str | Pattern") -> Pattern:
    """Build a pattern from a spec such as `bounded:20,phase=random`; a pattern is returned unchanged."""
    pattern = PATTERNS.make(spec) if isinstance(spec, str) else spec
    if not isinstance(pattern, Pattern):
        remedy = "; for a schedule, mf.availability.Explicit(matrix)" if isinstance(spec, (list, tuple)) or hasattr(spec, "shape") else ""
        raise UsageError(f"availability must be {PATTERNS.wanted}, got {shown(spec)}{remedy}")
    flag("warm_start", pattern.warm_start)
    return pattern


def uniforms(seed: int, rounds: int, num_clients: int) -> np.ndarray:
    """Draw one uniform number per round and client, [rounds, num_clients]; every round has a separate random stream."""
    return np.stack([stream(seed, "availability", t).random(num_clients) for t in range(rounds)])


@register("always")
@dataclass(frozen=True)
class Always(Pattern):
    """All clients are available in every round."""

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        return np.ones(num_clients)

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        return np.ones((rounds, num_clients), dtype=bool)


@register("bounded")
@dataclass(frozen=True)
class Bounded(Pattern):
    """Client i is available every tau_i rounds, with tau_i uniform on 0..tau_max; 0 and 1 both mean every round.

    With `phase="aligned"` all clients participate in round 0; with `"random"` each client starts at a random point of its period.
    `gaps="half-normal"` draws tau_i as the script of the paper's authors does: |3 z|, rounded, with z standard normal. Few clients then
    miss more than five rounds in a row, and tau_max has almost no effect above 10.
    """

    tau_max: int = 20
    phase: str = "aligned"
    gaps: str = "uniform"

    def __post_init__(self) -> None:
        integer("tau_max", self.tau_max, low=0)
        one_of("phase", self.phase, ["aligned", "random"])
        one_of("gaps", self.gaps, ["uniform", "half-normal"])

    def _periods(self, rng: np.random.Generator, num_clients: int) -> np.ndarray:
        if self.gaps == "uniform":
            tau = rng.integers(0, self.tau_max + 1, size=num_clients)
        else:
            tau = np.minimum(np.rint(np.abs(rng.normal(0, 3, size=num_clients))).astype(int), self.tau_max)
        return np.maximum(tau, 1)

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        return np.asarray(1 / self._periods(stream(seed, "availability"), num_clients))

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        rng = stream(seed, "availability")
        period = self._periods(rng, num_clients)
        start = rng.integers(0, period) if self.phase == "random" else 0
        return np.asarray((np.arange(rounds)[:, None] + start) % period == 0)


@register("static")
@dataclass(frozen=True)
class Static(Pattern):
    """Client i is available with probability p (one number, or one per client), independently in each round."""

    p: float | Sequence[float] = 0.1

    def __post_init__(self) -> None:
        given = plain(self.p)
        each = isinstance(given, (list, tuple))
        for value in given if each else [given]:
            probability("p", value)
        object.__setattr__(self, "p", list(given) if each else given)

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        p = np.asarray(self.p, dtype=float)
        if p.ndim and len(p) != num_clients:
            raise UsageError(f"static availability has {len(p)} probabilities for {num_clients} clients: give one number or {num_clients}")
        return np.broadcast_to(p, num_clients)

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        return np.asarray(uniforms(seed, rounds, num_clients) < self.rates(num_clients, seed, class_counts))


@register("time-varying")
@dataclass(frozen=True)
class TimeVarying(Pattern):
    """P*N clients participate per round, drawn without replacement with weights a_i uniform on [1, 10], redrawn in every round."""

    P: float = 0.1

    def __post_init__(self) -> None:
        probability("P", self.P)

    def _count(self, num_clients: int) -> int:
        count = int(np.floor(self.P * num_clients + 0.5))
        if count == 0:
            raise UsageError(f"time-varying:{self.P:g} of {num_clients} clients rounds to 0 clients: raise P or the number of clients")
        return count

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        return np.full(num_clients, self._count(num_clients) / num_clients)

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        count = self._count(num_clients)
        available = np.zeros((rounds, num_clients), dtype=bool)
        for t in range(rounds):
            rng = stream(seed, "availability", t)
            weight = rng.uniform(1, 10, size=num_clients)
            # Exponential race: the first `count` arrivals are a weighted draw without replacement.
            arrival = rng.exponential(size=num_clients) / weight
            available[t, np.argpartition(arrival, count - 1)[:count]] = True
        return available


@register("markov")
@dataclass(frozen=True)
class Markov(Pattern):
    """A two-state Markov chain per client, stationary from round 0.

    In each round an unavailable client reconnects with probability `up`, and an available one drops out with probability `down`.
    """

    up: float = 0.1
    down: float = 0.5

    def __post_init__(self) -> None:
        if probability("up", self.up) + probability("down", self.down) == 0:
            raise UsageError("markov needs up or down above 0: with both 0 no client ever changes its state")

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        return np.full(num_clients, self.up / (self.up + self.down))

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        chance = uniforms(seed, rounds, num_clients)
        available = np.empty((rounds, num_clients), dtype=bool)
        available[0] = chance[0] < self.up / (self.up + self.down)
        for t in range(1, rounds):
            available[t] = np.where(available[t - 1], chance[t] >= self.down, chance[t] < self.up)
        return available


@register("cyclic")
@dataclass(frozen=True)
class Cyclic(Pattern):
    """Each client is available for `on` consecutive rounds out of every `period`, like day and night, with a random phase per client."""

    period: int = 20
    on: int = 4

    def __post_init__(self) -> None:
        integer("period", self.period), integer("on", self.on)
        if self.on > self.period:
            raise UsageError(f"cyclic: on={self.on} is longer than period={self.period}")

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        return np.full(num_clients, self.on / self.period)

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        phase = stream(seed, "availability").integers(0, self.period, size=num_clients)
        return (np.arange(rounds)[:, None] + phase) % self.period < self.on
