"""How clients differ in speed and bandwidth: one positive number per client, drawn from a named distribution or read from a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError, number, shown
from ..registry import Registry
from ..seeds import stream


class Distribution:
    """Base class: `draw` returns one positive number per client."""

    def draw(self, rng: np.random.Generator, num_clients: int) -> np.ndarray:
        raise NotImplementedError(f"{type(self).__name__} must define draw(rng, num_clients)")


DISTRIBUTIONS: Registry[Distribution] = Registry(
    "distribution",
    ("speed", "bandwidth"),
    lambda thing: isinstance(thing, Distribution) or (isinstance(thing, type) and issubclass(thing, Distribution)),
    "a distribution such as lognormal:100,0.5, a number, or file:speeds.csv",
)
register = DISTRIBUTIONS.register


def make(what: str, spec: Any) -> Distribution | None:
    """A distribution from a spec, a number or an object; None if the spec is `none`."""
    if spec == "none":
        return None
    if isinstance(spec, Distribution):
        return spec
    if isinstance(spec, str):
        try:
            value = float(spec)
        except ValueError:
            return DISTRIBUTIONS.make(spec)
        return DISTRIBUTIONS.make(f"constant:{number(what, value, low=0, open_low=True):.17g}")
    return Constant(number(what, spec, low=0, open_low=True))


def drawn(what: str, distribution: Distribution, num_clients: int, seed: int) -> np.ndarray:
    """The clients' values, checked; they depend only on the seed and on `what` they are: speed or bandwidth."""
    values = np.asarray(distribution.draw(stream(seed, what), num_clients), dtype=float)
    if values.shape != (num_clients,):
        raise UsageError(f"{what}: there are {values.size} values for {num_clients} clients; give one per client")
    if not (np.isfinite(values).all() and (values > 0).all()):
        client = int(np.flatnonzero(~(np.isfinite(values) & (values > 0)))[0])
        raise UsageError(f"{what} must be a number above 0, got {values[client]:g} for client {client}")
    return values


@register("constant")
@dataclass(frozen=True)
class Constant(Distribution):
    """The same value for all clients."""

    value: float = 1.0

    def __post_init__(self) -> None:
        number("value", self.value, low=0, open_low=True)

    def draw(self, rng: np.random.Generator, num_clients: int) -> np.ndarray:
        return np.full(num_clients, float(self.value))


@register("lognormal")
@dataclass(frozen=True)
class LognormalValues(Distribution):
    """Lognormal with this median; sigma is the standard deviation of the logarithm."""

    median: float = 1.0
    sigma: float = 0.5

    def __post_init__(self) -> None:
        number("median", self.median, low=0, open_low=True), number("sigma", self.sigma, low=0, high=20)

    def draw(self, rng: np.random.Generator, num_clients: int) -> np.ndarray:
        return self.median * rng.lognormal(0.0, self.sigma, num_clients)


@register("uniform")
@dataclass(frozen=True)
class UniformValues(Distribution):
    """Uniform between two values."""

    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        number("low", self.low, low=0, open_low=True), number("high", self.high, low=self.low)

    def draw(self, rng: np.random.Generator, num_clients: int) -> np.ndarray:
        return rng.uniform(self.low, self.high, num_clients)


@register("pareto")
@dataclass(frozen=True)
class Stragglers(Distribution):
    """The fastest clients have this value, and a client is slower by a factor with a Pareto tail: a few are very slow.

    A smaller `tail` means more stragglers; P(slower than the fastest by more than x) = x^-tail.
    """

    fastest: float = 1.0
    tail: float = 1.5

    def __post_init__(self) -> None:
        number("fastest", self.fastest, low=0, open_low=True), number("tail", self.tail, low=0, open_low=True)

    def draw(self, rng: np.random.Generator, num_clients: int) -> np.ndarray:
        return np.asarray(self.fastest / (1 + rng.pareto(self.tail, num_clients)))


@register("file")
@dataclass(frozen=True)
class FromFile(Distribution):
    """One number per line, in the order of the clients; lines that begin with # are comments."""

    file: str = ""

    def draw(self, rng: np.random.Generator, num_clients: int) -> np.ndarray:
        if not self.file:
            raise UsageError("name a file, as in file:speeds.csv")
        try:
            lines = Path(self.file).read_text(encoding="utf-8-sig").splitlines()
            return np.array([float(line.strip().rstrip(",")) for line in lines if line.strip() and not line.startswith("#")])
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read one number per line from {shown(self.file)}: {error}") from None
