"""Clients that differ in how often they are available, and availability that changes over time.

`label-correlated` has two probabilities, for clients that hold certain classes and for the others. Elsewhere the probabilities p_i are
drawn once per run from a Dirichlet or a lognormal distribution and scaled to a given mean. With `labels=true` one weight per class is
drawn, and a client's weight is the mean over its samples, so availability depends on the data, as in the experiments of FedAU (Wang and Ji,
2024) and FedAWE (Xiang et al., 2024). The three patterns that change over time are those of FedAWE: client i is available in round t with
probability p_i f(t).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import UsageError, flag, integer, number, plain, probability, shown, unit_interval
from ..seeds import stream
from .patterns import Pattern, register, uniforms


def scaled(weights: np.ndarray, mean: float, least: float) -> np.ndarray:
    """Multiply the weights by a common factor so that, clipped to [least, 1], they have this mean."""
    if not mean or not weights.any():
        return np.full(len(weights), mean)
    low, high = 0.0, 1.0
    while np.clip(high * weights, least, 1).mean() < mean:
        low, high = high, 2 * high
        if not np.isfinite(high):  # fewer than mean * N weights are above zero: the others have to make up for it
            return np.where(weights > 0, 1.0, (mean * len(weights) - (weights > 0).sum()) / max((weights == 0).sum(), 1))
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(middle * weights, least, 1).mean() < mean else (low, middle)
    return np.clip(high * weights, least, 1)


def by_labels(class_weights: np.ndarray, class_counts: np.ndarray) -> np.ndarray:
    """The weight of each client: the mean class weight of its samples."""
    return np.asarray(class_counts @ class_weights / np.maximum(class_counts.sum(axis=1), 1))


@register("label-correlated")
@dataclass(frozen=True)
class LabelCorrelated(Pattern):
    """Static probabilities that depend on the data: clients that hold `classes` participate with `rare`, the others with `common`.

    A client holds these classes if at least the share `share` of its samples belongs to them.
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
        classes = [integer("a label in classes", c, low=0) for c in given]
        if len(set(classes)) < len(classes):  # probably a typo; its samples must not count twice
            raise UsageError(f"classes must name each label once, got {shown(classes)}")
        object.__setattr__(self, "classes", classes)

    @property
    def needs_labels(self) -> bool:
        return True

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        if class_counts is None:
            raise UsageError("label-correlated availability needs labelled classes and a split; use another pattern for this data")
        if self.classes and max(self.classes) >= class_counts.shape[1]:
            raise UsageError(f"label-correlated: class {max(self.classes)} is not in the data, which has {class_counts.shape[1]} classes")
        held = class_counts[:, list(self.classes)].sum(axis=1) / np.maximum(class_counts.sum(axis=1), 1)
        return np.where(held >= self.share, self.rare, self.common)

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        return np.asarray(uniforms(seed, rounds, num_clients) < self.rates(num_clients, seed, class_counts))


@dataclass(frozen=True)
class Heterogeneous(Pattern):
    """Base class of patterns with one probability per client: `weights` draws them up to a common factor."""

    def weights(self, rng: np.random.Generator, size: int) -> np.ndarray:
        raise NotImplementedError(f"{type(self).__name__} must define weights(rng, size)")

    @property
    def needs_labels(self) -> bool:
        return bool(getattr(self, "labels", False))

    def drawn(self, mean: float, least: float, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        """The clients' probabilities, with this mean and none below `least`."""
        rng = stream(seed, "participation probabilities")
        if not self.needs_labels:
            return scaled(self.weights(rng, num_clients), mean, least)
        if class_counts is None:
            raise UsageError("labels=true needs labelled classes and a split; use labels=false for this data")
        return scaled(by_labels(self.weights(rng, class_counts.shape[1]), class_counts), mean, least)


@dataclass(frozen=True)
class _Static(Heterogeneous):
    def probabilities(self, num_clients: int, seed: int, class_counts: np.ndarray | None = None) -> np.ndarray:
        """The probability of each client, [N]."""
        mean, least = (getattr(self, name) for name in ("mean", "least"))
        return self.drawn(mean, least, num_clients, seed, class_counts)

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        return self.probabilities(num_clients, seed, class_counts)

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        return uniforms(seed, rounds, num_clients) < self.probabilities(num_clients, seed, class_counts)


def _check(mean: float, least: float, labels: bool) -> None:
    probability("mean", mean), probability("least", least), flag("labels", labels)
    if least > mean:
        raise UsageError(f"least={least:g} is above mean={mean:g}: no client can be available less often than least")


@register("dirichlet")
@dataclass(frozen=True)
class Dirichlet(_Static):
    """Client i is available with probability p_i in each round; the p_i follow a Dirichlet distribution with concentration `alpha`.

    The smaller alpha, the more the clients differ. The defaults, with `labels=true`, are the experiments of FedAU (Wang and Ji, 2024):
    one weight per class from Dirichlet(0.1), mean probability 0.1, none below 0.02.
    """

    alpha: float = 0.1
    mean: float = 0.1
    least: float = 0.02
    labels: bool = False

    def __post_init__(self) -> None:
        number("alpha", self.alpha, low=0, open_low=True)
        _check(self.mean, self.least, self.labels)

    def weights(self, rng: np.random.Generator, size: int) -> np.ndarray:
        return rng.dirichlet(np.full(size, self.alpha))


@register("lognormal")
@dataclass(frozen=True)
class Lognormal(_Static):
    """Client i is available with probability p_i in each round; log p_i is normal with standard deviation `sigma`, and p_i at most 1."""

    sigma: float = 1.0
    mean: float = 0.1
    least: float = 0.0
    labels: bool = False

    def __post_init__(self) -> None:
        number("sigma", self.sigma, low=0, high=20)
        _check(self.mean, self.least, self.labels)

    def weights(self, rng: np.random.Generator, size: int) -> np.ndarray:
        return rng.lognormal(0.0, self.sigma, size)


@dataclass(frozen=True)
class _Varying(Heterogeneous):
    """p_i f(t). All p_i equal `p`; with `alpha` above 0, they follow a Dirichlet distribution and have the mean `p`."""

    p: float = 0.5
    period: int = 20
    alpha: float = 0.0
    labels: bool = False

    def __post_init__(self) -> None:
        probability("p", self.p), integer("period", self.period, low=2), number("alpha", self.alpha, low=0), flag("labels", self.labels)
        if self.labels and not self.alpha:
            raise UsageError("labels=true needs alpha above 0: with alpha=0 all clients have the same probability")

    def weights(self, rng: np.random.Generator, size: int) -> np.ndarray:
        return rng.dirichlet(np.full(size, self.alpha)) if self.alpha else np.ones(size)

    def factor(self, t: np.ndarray) -> np.ndarray:
        """f(t) for rounds t."""
        raise NotImplementedError

    def probabilities(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None = None) -> np.ndarray:
        """The probability of each client in each round, [rounds, N]."""
        p = self.drawn(self.p, 0.0, num_clients, seed, class_counts)
        return np.asarray(self.factor(np.arange(rounds))[:, None] * p)

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        return np.asarray(self.probabilities(self.period, num_clients, seed, class_counts).mean(axis=0))

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        return uniforms(seed, rounds, num_clients) < self.probabilities(rounds, num_clients, seed, class_counts)


@register("sine")
@dataclass(frozen=True)
class Sine(_Varying):
    """Client i is available in round t with probability p_i (gamma sin(2 pi t / period) + 1 - gamma) (FedAWE)."""

    gamma: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        number("gamma", self.gamma, low=0, high=0.5)  # above 0.5 the probability would be negative

    def factor(self, t: np.ndarray) -> np.ndarray:
        return np.asarray(self.gamma * np.sin(2 * np.pi * t / self.period) + 1 - self.gamma)


@register("interleaved-sine")
@dataclass(frozen=True)
class InterleavedSine(Sine):
    """As `sine`, but clients whose probability falls below `cutoff` are not available at all in that round (FedAWE)."""

    cutoff: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        probability("cutoff", self.cutoff)

    def probabilities(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None = None) -> np.ndarray:
        p = super().probabilities(rounds, num_clients, seed, class_counts)
        return np.where(p < self.cutoff, 0.0, p)


@register("staircase")
@dataclass(frozen=True)
class Staircase(_Varying):
    """Client i is available with probability p_i in the first half of every period and with `low` p_i in the second (FedAWE)."""

    low: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        unit_interval("low", self.low)

    def factor(self, t: np.ndarray) -> np.ndarray:
        return np.where(t % self.period < self.period / 2, 1.0, self.low)
