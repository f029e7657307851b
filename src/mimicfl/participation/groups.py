"""Groups of clients that are available or unavailable together."""

from dataclasses import dataclass

import numpy as np

from ..errors import UsageError, integer, one_of, probability
from ..seeds import stream
from .patterns import Markov, Pattern, register, uniforms


@dataclass(frozen=True)
class _Grouped(Pattern):
    """Clients in groups of equal size (up to one), drawn at random, or by the class that most of a client's samples belong to."""

    groups: int = 5
    by: str = "random"

    def __post_init__(self) -> None:
        integer("groups", self.groups)
        one_of("by", self.by, ["random", "labels"])

    @property
    def needs_labels(self) -> bool:
        return self.by == "labels"

    def members(self, num_clients: int, seed: int, class_counts: np.ndarray | None = None) -> np.ndarray:
        """The group of each client, [N]."""
        if self.groups > num_clients:
            raise UsageError(f"{self.groups} groups need at least {self.groups} clients, got {num_clients}: lower groups")
        order = stream(seed, "participation groups").permutation(num_clients)
        if self.by == "labels":
            if class_counts is None:
                raise UsageError("by=labels needs labelled classes and a split; use by=random for this data")
            order = order[np.argsort(class_counts.argmax(axis=1)[order], kind="stable")]  # clients of one class side by side
        group = np.empty(num_clients, dtype=int)
        group[order] = np.arange(num_clients) * self.groups // num_clients
        return group


@register("outages")
@dataclass(frozen=True)
class Outages(_Grouped):
    """Correlated outages: a whole group drops out with probability `down` per round and reconnects with probability `up`.

    While its group is connected, a client is available with probability `p`. Availability is thus correlated across clients and over
    time, as in Rodio, Faticanti, Marfoq, Neglia and Leonardi (2023), "Federated learning under heterogeneous and correlated client
    availability".
    """

    up: float = 0.2
    down: float = 0.1
    p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        probability("p", self.p)
        Markov(self.up, self.down)  # the same checks

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        return np.full(num_clients, self.p * self.up / (self.up + self.down))

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        group = self.members(num_clients, seed, class_counts)
        connected = Markov(self.up, self.down).draw(rounds, self.groups, seed, None)
        present = np.stack([stream(seed, "availability within groups", t).random(num_clients) for t in range(rounds)]) < self.p
        return np.asarray(connected[:, group] & present)


@register("circles")
@dataclass(frozen=True)
class Circles(_Grouped):
    """Disjoint groups take turns: each is available for `on` consecutive rounds, then the next; two groups are never available together.

    A client of the group whose turn it is participates with probability `p`. This is the cyclic participation of Cho, Sharma, Joshi,
    Xu, Kale and Zhang (2023), "On the convergence of federated averaging with cyclic client participation", and, with `by=labels`, a
    block-cyclic data distribution (Eichner et al., 2019).
    """

    on: int = 1
    p: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("on", self.on), probability("p", self.p)

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        return np.full(num_clients, self.p / self.groups)

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        turn = np.arange(rounds) // self.on % self.groups
        mine = turn[:, None] == self.members(num_clients, seed, class_counts)
        return np.asarray(mine & (uniforms(seed, rounds, num_clients) < self.p))
