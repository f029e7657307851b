"""The suite as data: datasets, availability patterns, algorithms and grids."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import UsageError, nearest
from ..settings import Experiment, from_dict
from .grid import EXTENSIONS, Axis, Config, Grid

TUNING_SEEDS = (1000, 1001, 1002)  # no result uses them
VALIDATION = 0.2  # share of the training samples on which configurations are compared
PROTOCOL = {
    "tuning": "12 configurations per algorithm and cell, mean over the last tenth of the run on held-out training samples, 3 seeds of "
    f"their own; a best configuration on an edge extends the grid, at most {EXTENSIONS} times",
    "primary": "mean test accuracy over the last tenth of the run, paired by seed",
    "tests": "paired t and sign-flip tests of all pairs under a pattern, Holm; Friedman and Nemenyi over the patterns",
    "oracles": "algorithms that are given what no deployment knows are shown, and neither tested nor ranked nor recommended",
    "diverged": "a run that diverges scores as a constant prediction",
    "tuning_seeds": list(TUNING_SEEDS),
    "validation": VALIDATION,
    "extensions": EXTENSIONS,
}


@dataclass(frozen=True)
class PatternCase:
    """An availability pattern and the kind of federation that it stands for."""

    name: str
    availability: str
    about: str


@dataclass(frozen=True)
class Part:
    """A dataset with its model and population, under several patterns."""

    name: str
    title: str
    settings: dict[str, Any]
    patterns: tuple[PatternCase, ...]
    grids: tuple[Grid, ...]
    seeds: int
    target: float  # accuracy; the cost of reaching it is a metric
    device: str = "cpu"
    chance: float = 0.1  # accuracy of a constant prediction, which a diverged run scores

    @property
    def rounds(self) -> int:
        return int(self.settings["rounds"])

    def cells(self) -> "list[Cell]":
        return [Cell(self, pattern, grid) for pattern in self.patterns for grid in self.grids]

    def plan(self) -> dict[str, Any]:
        """Everything that is fixed before the first run."""
        return json.loads(json.dumps({"part": asdict(self), "protocol": PROTOCOL}))  # type: ignore[no-any-return]


def hash_of(plan: dict[str, Any]) -> str:
    """The hash of a plan."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Cell:
    """One algorithm under one pattern."""

    part: Part
    pattern: PatternCase
    grid: Grid
    made: dict[tuple[float, ...], dict[str, Experiment]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        return f"{self.pattern.name}-{self.grid.algorithm}"

    def tuning(self, config: Config) -> dict[str, Experiment]:
        """The runs that score a configuration, by id."""
        return self._runs(config, TUNING_SEEDS, VALIDATION)

    def final(self, config: Config) -> dict[str, Experiment]:
        """The runs that are compared, by id."""
        return self._runs(config, range(self.part.seeds), 0.0)

    def _runs(self, config: Config, seeds: Sequence[int], validation: float) -> dict[str, Experiment]:
        key = (*config.values(), validation)
        if key not in self.made:  # thousands of experiments, and each is asked for after every batch
            runs = [self._experiment(config, seed, validation) for seed in seeds]
            self.made[key] = {e.id: e for e in runs}
        return self.made[key]

    def _experiment(self, config: Config, seed: int, validation: float) -> Experiment:
        own = {"availability": self.pattern.availability, "seed": seed, "validation": validation}
        return from_dict(self.part.settings | self.grid.settings(config, self.part.rounds) | own, self.name).resolved()


FINAL = Axis("final", (0.05, 0.5))
SERVER = Axis("server", (0.5, 1.0), 2.0)
GAMMA = Axis("gamma", (1.5, 3.0), 2.0, least=1.0)  # 1 does not amplify
THIRD = {
    "fedavg": SERVER,
    "fedprox": Axis("mu", (0.01, 0.1), 10.0),
    "fedavgm": Axis("momentum", (0.5, 0.9)),
    "amplified-fedavg": GAMMA,
    "known-p": SERVER,
    "fedau": Axis("cutoff", (10.0, 50.0), 5.0, least=2.0),
    "fedawe": Axis("clip", (0.5, 2.0), 4.0),
    "scaffold": SERVER,
    "amplified-scaffold": GAMMA,
    "focus": Axis("server", (0.1, 0.3), 3.0),  # its direction is a sum over all clients, not a mean
    "mifa": SERVER,
    "fedstale": Axis("beta", (0.2, 0.8)),
    "fedvarp": SERVER,
    "mimic": SERVER,
    "fedgain": Axis("gain", (0.5, 0.9)),
    "fedsteer": SERVER,  # with its default gain
}
FIXED = {"fedawe": "evaluate=mean"}  # as its authors run it, with the clipped step
ORACLES = frozenset({"known-p"})  # told the true participation rates
FEW = ("fedavg", "fedau", "scaffold", "mifa", "fedvarp", "mimic", "fedsteer")  # for the parts whose runs are expensive


def grids(*rates: float, algorithms: Sequence[str] = tuple(THIRD)) -> tuple[Grid, ...]:
    """Twelve configurations for every algorithm: three rates, two decays, and two values of a third axis."""
    return tuple(Grid(name, (Axis("rate", rates, 3.0), FINAL, THIRD[name]), FIXED.get(name, "")) for name in algorithms)


PATTERNS = (
    PatternCase("exchangeable", "static:0.1", "every client is available in 10 % of the rounds, independently"),
    PatternCase(
        "heterogeneous", "dirichlet:0.3,mean=0.1,least=0.01", "clients differ: a few are often available, most rarely; labels play no role"
    ),
    PatternCase(
        "label-tied",
        "label-correlated:classes=[0,1,2],rare=0.02,common=0.15",
        "clients that hold certain labels are available in only 2 % of the rounds, the others in 15 %",
    ),
    PatternCase("bursty", "markov:0.02,0.18", "clients stay for several rounds, then are absent for a long time"),
    PatternCase(
        "cyclic",
        "interleaved-sine:0.3,gamma=0.5,cutoff=0.15",
        "all come and go together, as between day and night; at night no client is available",
    ),
    PatternCase("bounded", "bounded:20,phase=random", "every client returns after a fixed number of rounds, 20 at most"),
    PatternCase("disjoint", "circles:5,on=2,p=0.5", "five groups of clients take turns and never participate together"),
    PatternCase(
        "phones",
        "diurnal:round=1800",
        "phones that charge at night, synthetic with the statistics of a recorded trace: 7 % available on average, 30 % of them never",
    ),
)
COMMON: dict[str, Any] = {"partition": "shards:2", "loss": "cross-entropy", "epochs": 5, "update": "sum", "weighting": "uniform"}
COMMON |= {"preset": "none", "dtype": "float32", "precision": "fp32"}
COMMON |= {"speed": "lognormal:median=100,sigma=1", "bandwidth": "lognormal:median=1,sigma=1"}  # no deadline: they only measure time

WARM = tuple(
    replace(p, availability=f"{p.availability},warm_start=true", about=f"{p.about}; all take part in the first round") for p in PATTERNS
)
HARD = tuple(p for p in PATTERNS if p.name in ("heterogeneous", "label-tied", "phones"))  # where algorithms differ
UNTIED = tuple(p for p in PATTERNS if p.name in ("heterogeneous", "bursty", "phones"))  # for natural clients, which hold all labels

DIGITS = COMMON | {"dataset": "digits", "model": "mlp:32", "num_clients": 30, "batch_size": 16, "rounds": 100, "eval_every": 1}
AVERAGED = DIGITS | {"average": 9.0}
FASHION = COMMON | {"dataset": "fmnist", "model": "lenet", "num_clients": 30, "batch_size": 16, "epochs": 2, "rounds": 200, "eval_every": 2}
CIFAR = COMMON | {"dataset": "cifar10", "model": "cnn", "num_clients": 30, "batch_size": 32, "epochs": 1, "rounds": 200, "eval_every": 4}
RESNET = CIFAR | {"model": "resnet:width=16", "rounds": 100}
WRITERS = COMMON | {"dataset": "mnist-writers", "partition": "natural", "model": "lenet", "num_clients": 539, "batch_size": 16, "epochs": 1}
WRITERS |= {"rounds": 100, "eval_every": 1}
SOTU = COMMON | {"dataset": "sotu", "partition": "natural", "model": "transformer", "num_clients": 43, "batch_size": 16, "epochs": 1}
SOTU |= {"loss": "auto", "task": "token-prediction", "rounds": 60, "eval_every": 2}

SMALL, LARGE = grids(0.03, 0.1, 0.3), grids(0.03, 0.1, 0.3, algorithms=FEW)


def _part(name: str, title: str, settings: dict[str, Any], patterns: tuple[PatternCase, ...], target: float, chance: float = 0.1) -> Part:
    """An expensive part: for a GPU, with few algorithms and ten seeds."""
    return Part(name, title, settings, patterns, LARGE, seeds=10, target=target, device="cuda", chance=chance)


PARTS = {
    part.name: part
    for part in [
        Part("digits", "digits, 30 clients, MLP", DIGITS, PATTERNS, SMALL, seeds=20, target=0.9),
        Part("fmnist", "Fashion-MNIST, 30 clients, LeNet", FASHION, PATTERNS, SMALL, seeds=10, target=0.75, device="cuda"),
        Part("digits-warm", "digits, 30 clients, MLP, full first round", DIGITS, WARM, SMALL, seeds=20, target=0.9),
        Part("digits-averaged", "digits, 30 clients, MLP, averaged models", AVERAGED, PATTERNS, SMALL, seeds=20, target=0.9),
        _part("fmnist-100", "Fashion-MNIST, 100 clients, LeNet", FASHION | {"num_clients": 100}, HARD, target=0.75),
        _part("fmnist-1000", "Fashion-MNIST, 1,000 clients, LeNet", FASHION | {"num_clients": 1000}, HARD, target=0.75),
        _part("cifar10", "CIFAR-10, 30 clients, small CNN with GroupNorm", CIFAR, HARD, target=0.5),
        _part("cifar10-resnet", "CIFAR-10, 30 clients, narrow ResNet-18 with GroupNorm", RESNET, HARD, target=0.5),
        _part("mnist-writers", "MNIST by writer, 539 clients, LeNet", WRITERS, UNTIED, target=0.95),
        _part("sotu", "State of the Union by president, 43 clients, transformer", SOTU, UNTIED, target=0.4, chance=0.18),
    ]
}

# Local steps of a client per round, which the pages show: they follow from the settings and the data, and are not part of a plan.
LOCAL_STEPS = {"digits": 15, "digits-warm": 15, "digits-averaged": 15, "fmnist": 250, "fmnist-100": 76, "fmnist-1000": 8, "cifar10": 53}
LOCAL_STEPS |= {"cifar10-resnet": 53, "mnist-writers": 7, "sotu": 220}  # the last two on average


def find_part(name: str) -> Part:
    if name not in PARTS:
        raise UsageError(f"the benchmark has no part {name!r}; {nearest(name, PARTS)}; see mimicfl benchmark list")
    return PARTS[name]
