"""Availability patterns: the paper's three, and those under which methods separate most.

A pattern is a small frozen record with one method, `draw`, that returns bool [rounds, clients]. What a client does in
round t depends on the seed and t alone, never on how many rounds were asked for: a longer run has the same beginning.

    >>> from mimicfl.availability import Bounded, schedule
    >>> schedule(Bounded(3), rounds=4, num_clients=3, seed=1).astype(int)
    array([[1, 1, 1],
           [0, 1, 0],
           [0, 1, 0],
           [1, 1, 1]])
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import UsageError, flag, number, one_of, plain, probability, shown, whole
from ..registry import Registry
from ..seeds import stream

PATTERNS: Registry["Pattern"] = Registry(
    "availability",
    ("availability",),
    lambda thing: isinstance(thing, Pattern) or (isinstance(thing, type) and issubclass(thing, Pattern)),
    "a pattern such as TimeVarying(0.1) or its text",
)
register = PATTERNS.register


@dataclass(frozen=True)
class Pattern:
    """Subclass this and write `draw`; `warm_start=True` puts everybody into round 0, as the paper's analysis assumes."""

    warm_start: bool = field(default=False, kw_only=True)

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        """Bool [rounds, num_clients]; `class_counts` [num_clients, classes] says which labels each client holds."""
        raise NotImplementedError(f"{type(self).__name__} must define draw(rounds, num_clients, seed, class_counts)")


def schedule(pattern: "Pattern | str", rounds: int, num_clients: int, seed: int = 0, class_counts: np.ndarray | None = None) -> np.ndarray:
    """The schedule a pattern makes, bool [rounds, num_clients], checked."""
    pattern = make(pattern)
    whole("rounds", rounds), whole("num_clients", num_clients), whole("seed", seed, low=0)
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
            f"expected bool of shape ({rounds}, {num_clients}): one row a round, one column a client"
        )
    available = drawn.copy()
    if pattern.warm_start:
        available[0] = True
    return available


def _counts(class_counts: Any, num_clients: int) -> np.ndarray:
    try:
        counts = np.asarray(class_counts)
    except Exception:  # whatever an object's own conversion raises
        counts = np.empty(0)
    if counts.ndim != 2 or len(counts) != num_clients or counts.dtype.kind not in "iu":
        found = f"{counts.dtype} of shape {counts.shape}"
        raise UsageError(f"class_counts must be whole numbers of shape ({num_clients}, classes), one row per client, got {found}")
    return counts


def make(spec: "str | Pattern") -> Pattern:
    """A pattern from `bounded:20,phase=random` and the like; a pattern is returned as it is."""
    pattern = PATTERNS.make(spec) if isinstance(spec, str) else spec
    if not isinstance(pattern, Pattern):
        raise UsageError(f"availability must be {PATTERNS.wanted}, got {shown(spec)}")
    flag("warm_start", pattern.warm_start)
    return pattern


def uniforms(seed: int, rounds: int, num_clients: int) -> np.ndarray:
    """One uniform number for every round and client, [rounds, num_clients], each round from a stream of its own."""
    return np.stack([stream(seed, "availability", t).random(num_clients) for t in range(rounds)])


@register("always")
@dataclass(frozen=True)
class Always(Pattern):
    """Nobody ever drops out."""

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        return np.ones((rounds, num_clients), dtype=bool)


@register("bounded")
@dataclass(frozen=True)
class Bounded(Pattern):
    """Client i is active every tau_i rounds, tau_i uniform on 0..tau_max; 0 and 1 both mean every round.

    `phase="aligned"` counts from round 0 for everybody (so round 0 is full); `"random"` starts each client anywhere
    in its period. `gaps="half-normal"` draws tau_i as the script of the paper's authors does, |3 z| rounded with z normal: few
    clients then miss more than five rounds, and tau_max hardly matters from 10 on.
    """

    tau_max: int = 20
    phase: str = "aligned"
    gaps: str = "uniform"

    def __post_init__(self) -> None:
        whole("tau_max", self.tau_max, low=0)
        one_of("phase", self.phase, ["aligned", "random"])
        one_of("gaps", self.gaps, ["uniform", "half-normal"])

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        rng = stream(seed, "availability")
        if self.gaps == "uniform":
            tau = rng.integers(0, self.tau_max + 1, size=num_clients)
        else:
            tau = np.minimum(np.rint(np.abs(rng.normal(0, 3, size=num_clients))).astype(int), self.tau_max)
        period = np.maximum(tau, 1)
        start = rng.integers(0, period) if self.phase == "random" else 0
        return np.asarray((np.arange(rounds)[:, None] + start) % period == 0)


@register("static")
@dataclass(frozen=True)
class Static(Pattern):
    """Client i is active with probability p (one number, or one per client), independently in every round."""

    p: float | Sequence[float] = 0.1

    def __post_init__(self) -> None:
        given = plain(self.p)
        each = isinstance(given, (list, tuple))
        for value in given if each else [given]:
            probability("p", value)
        object.__setattr__(self, "p", list(given) if each else given)

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        p = np.asarray(self.p)
        if p.ndim and len(p) != num_clients:
            raise UsageError(f"static availability has {len(p)} probabilities for {num_clients} clients: give one number or {num_clients}")
        return uniforms(seed, rounds, num_clients) < p


@register("time-varying")
@dataclass(frozen=True)
class TimeVarying(Pattern):
    """P*N clients a round, drawn without replacement with weights a_i uniform on [1, 10], new in every round."""

    P: float = 0.1

    def __post_init__(self) -> None:
        probability("P", self.P)

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        count = int(np.floor(self.P * num_clients + 0.5))
        if count == 0:
            raise UsageError(f"time-varying:{self.P:g} of {num_clients} clients rounds to nobody: raise P or the number of clients")
        available = np.zeros((rounds, num_clients), dtype=bool)
        for t in range(rounds):
            rng = stream(seed, "availability", t)
            weight = rng.uniform(1, 10, size=num_clients)
            # An exponential race: the first `count` arrivals are a draw without replacement by weight.
            arrival = rng.exponential(size=num_clients) / weight
            available[t, np.argpartition(arrival, count - 1)[:count]] = True
        return available


@register("markov")
@dataclass(frozen=True)
class Markov(Pattern):
    """Two states: an absent client comes back with probability `up`, a present one leaves with `down`; stationary from round 0."""

    up: float = 0.1
    down: float = 0.5

    def __post_init__(self) -> None:
        if probability("up", self.up) + probability("down", self.down) == 0:
            raise UsageError("markov needs up or down above 0: with both 0 nobody ever changes state")

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
    """Like day and night: each client is present for `on` rounds out of every `period`, from a random phase of its own."""

    period: int = 20
    on: int = 4

    def __post_init__(self) -> None:
        whole("period", self.period), whole("on", self.on)
        if self.on > self.period:
            raise UsageError(f"cyclic: on={self.on} is longer than period={self.period}")

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        phase = stream(seed, "availability").integers(0, self.period, size=num_clients)
        return (np.arange(rounds)[:, None] + phase) % self.period < self.on


@register("label-correlated")
@dataclass(frozen=True)
class LabelCorrelated(Pattern):
    """Static probabilities that depend on the data: clients holding one of `classes` answer with `rare`, the others with `common`.

    A client counts as a holder when at least `share` of its samples are of those classes.
    """

    classes: Sequence[int] = (0, 1)
    rare: float = 0.05
    common: float = 0.5
    share: float = 0.1

    def __post_init__(self) -> None:
        probability("rare", self.rare), probability("common", self.common)
        number("share", self.share, low=0, high=1, open_low=True)
        given = plain(self.classes)
        if not isinstance(given, Iterable) or isinstance(given, (str, bytes, Mapping)):
            raise UsageError(f"classes must be a list of labels such as [0,1], got {shown(given)}")
        classes = [whole("a label in classes", c, low=0) for c in given]
        if len(set(classes)) < len(classes):  # probably a typo; its samples must not count twice
            raise UsageError(f"classes must name each label once, got {shown(classes)}")
        object.__setattr__(self, "classes", classes)

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        if class_counts is None:
            raise UsageError("label-correlated availability needs labelled classes and a split; this data has none")
        if self.classes and max(self.classes) >= class_counts.shape[1]:
            raise UsageError(f"label-correlated: class {max(self.classes)} is not in the data, which has {class_counts.shape[1]} classes")
        held = class_counts[:, list(self.classes)].sum(axis=1) / np.maximum(class_counts.sum(axis=1), 1)
        p = np.where(held >= self.share, self.rare, self.common)
        return uniforms(seed, rounds, num_clients) < p


@register("explicit")
@dataclass(frozen=True, eq=False)
class Explicit(Pattern):
    """A schedule given as it is: a bool (or 0/1) array [rounds, clients], or a file (.npy, .json, .csv, .txt) that holds one."""

    matrix: Any = field(default=None, repr=False)
    in_words: ClassVar[str] = "settings name a schedule by its file, as in 'explicit:schedule.npy'; simulate takes the array itself"

    def __post_init__(self) -> None:
        source = self.matrix
        if source is None:
            raise UsageError("explicit availability needs a matrix or a file, as in explicit:schedule.csv")
        values = _read(source) if isinstance(source, (str, Path)) else source
        try:
            values = np.asarray(values)
        except ValueError:
            raise UsageError("explicit availability: the rows differ in length; it must be rounds x clients") from None
        except Exception:  # whatever an object's own conversion raises
            raise UsageError(f"explicit availability must be a matrix or a file, got {shown(source)}") from None
        where = str(source) if isinstance(source, (str, Path)) else "the matrix"
        if values.ndim != 2 or values.size == 0:
            raise UsageError(f"explicit availability: {where} must be rounds x clients, got shape {values.shape}")
        if values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
            raise UsageError(f"explicit availability: {where} must hold 0 and 1 only")
        object.__setattr__(self, "_values", values.astype(bool))

    @property
    def values(self) -> np.ndarray:
        return self._values  # type: ignore[attr-defined, no-any-return]

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        have_rounds, have_clients = self.values.shape
        if have_clients != num_clients:
            raise UsageError(
                f"the explicit schedule has {have_clients} clients but {num_clients} are required; "
                f"use {have_clients} clients or a schedule with {num_clients} columns"
            )
        if have_rounds < rounds:
            raise UsageError(
                f"the explicit schedule has {have_rounds} rounds but {rounds} are required; lower rounds or give a longer schedule"
            )
        return self.values[:rounds]


def _read(source: str | Path) -> Any:
    file = Path(source)
    try:
        if file.suffix == ".npy":
            return np.asarray(np.load(file, allow_pickle=False))
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            return json.loads(text)
        rows = [line.replace(",", " ").split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        return [[float(cell) for cell in row] for row in rows]
    except (OSError, EOFError, ValueError, RecursionError, MemoryError) as error:
        header = "; a .csv or .txt has numbers only, no header (or one that begins with #)" if "to float" in str(error) else ""
        raise UsageError(f"cannot read a schedule from {file}: {error}{header}") from None
