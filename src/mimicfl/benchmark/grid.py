"""Tuning: the same number of configurations for every algorithm, and a grid that grows where its best point lies on an edge.

A configuration is a choice of one value per axis. All algorithms share the axes `rate` (the first local learning rate) and `final` (the
last rate as a share of the first); the third axis is the server's rate as a multiple of the local one, or the algorithm's own option.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Config = dict[str, float]  # axis -> value
EXTENSIONS = 2  # how many times a grid may grow


@dataclass(frozen=True)
class Axis:
    name: str
    values: tuple[float, ...]  # increasing
    step: float = 0.0  # an edge is extended by this factor; 0: the range is complete
    least: float = 0.0  # no value may be lower


@dataclass(frozen=True)
class Grid:
    """All combinations of the values of three axes, with options of the algorithm that are the same in all of them."""

    algorithm: str
    axes: tuple[Axis, ...]
    fixed: str = ""

    def configs(self) -> list[Config]:
        names = [axis.name for axis in self.axes]
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*(axis.values for axis in self.axes))]

    def settings(self, config: Config, rounds: int) -> dict[str, Any]:
        """The settings of a run with this configuration.

        >>> Grid("fedprox", ()).settings({"rate": 0.1, "final": 0.05, "mu": 0.01}, rounds=100)["lr"]
        'geometric:0.1,0.970487'
        """
        decay = config["final"] ** (1 / rounds)
        server = config.get("server", 1.0)
        own = [f"{name}={value:g}" for name, value in config.items() if name not in ("rate", "final", "server")]
        options = ",".join([self.fixed] * bool(self.fixed) + own)
        return {
            "algorithm": f"{self.algorithm}:{options}" if options else self.algorithm,
            "lr": _rate(config["rate"], decay),
            "global_lr": "local" if server == 1 else _rate(config["rate"] * server, decay),
        }

    def beyond(self, best: Config, tried: Sequence[Config]) -> list[Config]:
        """New configurations next to the best one, for every axis on which it lies at an edge of what was tried."""
        found = []
        for axis in self.axes:
            values = sorted({config[axis.name] for config in tried})
            edges = [(values[0], 1 / axis.step), (values[-1], axis.step)] if axis.step else []
            new = [float(f"{edge * factor:.6g}") for edge, factor in edges if best[axis.name] == edge]
            found += [best | {axis.name: value} for value in new if value >= axis.least]
        return [config for config in found if config not in tried]


def _rate(first: float, decay: float) -> str:
    return f"constant:{first:g}" if decay == 1 else f"geometric:{first:g},{decay:.6g}"


def best_of(scores: Mapping[int, float]) -> int:
    """The position of the highest score; of equal ones the first."""
    return max(scores, key=lambda position: (scores[position], -position))
