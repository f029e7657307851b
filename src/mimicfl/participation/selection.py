"""Client selection: which of the available clients train in a round.

A selection is a frozen dataclass with one method, `choose`, that returns client numbers. A function of the candidates works as well:
`select=lambda c: c.available[:3]`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import UsageError, integer, number, shown
from ..registry import Registry
from ..seeds import stream

Losses = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Candidates:
    """What a selection may use: the round, the available clients, and facts about them."""

    t: int
    available: np.ndarray  # [a] sorted client numbers, at least one
    sizes: np.ndarray  # [N] training samples of every client
    seed: int
    losses: Losses  # the current model's training loss of these clients; computed when called

    @property
    def rng(self) -> np.random.Generator:
        """The random stream of this round; it restarts on every access."""
        return stream(self.seed, "selection", self.t)


class Selection:
    """Base class of all selections.

    needs_model   the choice depends on the model (through `losses`), so the schedule is not known before the run
    first         count only this many clients, the first that finish; None: all that finish
    """

    needs_model: ClassVar[bool] = False

    @property
    def first(self) -> int | None:
        return None

    @property
    def num_selected(self) -> int | None:
        """The number of clients selected if enough are available; None: all."""
        return None

    def choose(self, candidates: Candidates) -> np.ndarray:
        """The clients that are selected in this round."""
        raise NotImplementedError(f"{type(self).__name__} must define choose(candidates)")


SELECTIONS: Registry[Selection] = Registry(
    "selection",
    ("select",),
    lambda thing: isinstance(thing, Selection) or (isinstance(thing, type) and issubclass(thing, Selection)),
    "a selection such as Uniform(10), a string such as uniform:10, or a function",
)
register = SELECTIONS.register


def make(spec: Any) -> Selection:
    """Build a selection from a spec such as `uniform:10`, or from a function; a selection is returned unchanged."""
    if isinstance(spec, str):
        return SELECTIONS.make(spec)
    if isinstance(spec, Selection):
        return spec
    if callable(spec) and not isinstance(spec, type):
        return Custom(spec)
    raise UsageError(f"select must be {SELECTIONS.wanted}, got {shown(spec)}")


@register("all")
@dataclass(frozen=True)
class All(Selection):
    """All available clients are selected."""

    def choose(self, candidates: Candidates) -> np.ndarray:
        return candidates.available


@dataclass(frozen=True)
class _OfK(Selection):
    k: int = 10

    def __post_init__(self) -> None:
        integer("k", self.k)

    @property
    def num_selected(self) -> int | None:
        return self.k


@register("uniform")
@dataclass(frozen=True)
class Uniform(_OfK):
    """k of the available clients, each with the same probability; all of them if fewer are available."""

    def choose(self, candidates: Candidates) -> np.ndarray:
        here = candidates.available
        return candidates.rng.permutation(here)[: self.num_selected]


@register("over-select")
@dataclass(frozen=True)
class OverSelect(Uniform):
    """k * factor clients are selected, and the first k that finish are counted (Bonawitz et al., 2019, with factor 1.3)."""

    factor: float = 1.3

    def __post_init__(self) -> None:
        super().__post_init__()
        number("factor", self.factor, low=1, high=1000)

    @property
    def first(self) -> int | None:
        return self.k

    @property
    def num_selected(self) -> int | None:
        return math.ceil(self.k * self.factor - 1e-9)


@register("by-samples")
@dataclass(frozen=True)
class BySamples(_OfK):
    """k of the available clients, drawn without replacement with probabilities in proportion to their numbers of samples."""

    def choose(self, candidates: Candidates) -> np.ndarray:
        return by_samples(candidates, self.k)


@register("power-of-choice")
@dataclass(frozen=True)
class PowerOfChoice(_OfK):
    """The k clients with the largest loss among `candidates` ones, which are drawn in proportion to their numbers of samples.

    Cho, Wang and Joshi (2022), "Towards understanding biased client selection in federated learning" (pow-d). The loss is that of the
    current global model on all training samples of a candidate. Without `candidates`, 2k are drawn.
    """

    needs_model = True
    candidates: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if integer("candidates", self.candidates, low=0) and self.candidates < self.k:
            raise UsageError(f"power-of-choice: candidates={self.candidates} is below k={self.k}; draw at least k candidates")

    def choose(self, candidates: Candidates) -> np.ndarray:
        drawn = np.sort(by_samples(candidates, self.candidates or 2 * self.k))
        losses = candidates.losses(drawn) if len(drawn) > self.k else np.zeros(len(drawn))
        return drawn[np.argsort(-losses, kind="stable")[: self.k]]


@dataclass(frozen=True)
class Custom(Selection):
    """A function of the candidates that returns the numbers of the selected clients."""

    function: Callable[[Candidates], Any]
    needs_model = True  # it may ask for losses

    def choose(self, candidates: Candidates) -> np.ndarray:
        return np.asarray(self.function(candidates))


def by_samples(candidates: Candidates, k: int) -> np.ndarray:
    """Draw k of the available clients without replacement, in proportion to their numbers of samples."""
    here = candidates.available
    arrival = candidates.rng.exponential(size=len(here)) / candidates.sizes[here]  # the first k arrivals are such a draw
    first = np.arange(len(here)) if k >= len(here) else np.flatnonzero(arrival <= np.partition(arrival, k - 1)[k - 1])
    return here[first[np.argsort(arrival[first], kind="stable")[:k]]]


def chosen(selection: Selection, candidates: Candidates) -> np.ndarray:
    """The selected clients, sorted and checked."""
    found = np.asarray(selection.choose(candidates))
    name = getattr(getattr(selection, "function", None), "__name__", type(selection).__name__)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise UsageError(f"{name} must return a list of client numbers, got {shown(found)}")
    picked = np.unique(found).astype(np.int64)
    if len(picked) < len(found):
        raise UsageError(f"{name} selected a client twice in round {candidates.t}: return each client number once")
    place = np.minimum(np.searchsorted(candidates.available, picked), len(candidates.available) - 1)
    if len(strange := picked[candidates.available[place] != picked]):
        raise UsageError(f"{name} selected client {strange[0]} in round {candidates.t}, which is not available then")
    return picked


def check_population(selection: Selection, num_clients: int) -> None:
    """Refuse a selection that needs more clients than exist."""
    if selection.num_selected is not None and selection.num_selected > num_clients:
        raise UsageError(f"the selection needs {selection.num_selected} clients per round, but there are only {num_clients}; lower k")
    if isinstance(selection, PowerOfChoice) and selection.candidates > num_clients:
        raise UsageError(f"power-of-choice draws {selection.candidates} candidates, but there are only {num_clients} clients")
