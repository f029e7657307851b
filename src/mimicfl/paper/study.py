"""A study: a table whose columns vary one setting, whose rows are algorithms, and whose cells are runs over several seeds.

Every setting that affects a result is given explicitly, so that a later change of a default does not change a study.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..errors import number
from ..registry import parse
from ..settings import Experiment, from_dict
from .published import Published

ALL = ("fedavg", "fedprox", "scaffold", "mifa", "mimic")
COMMON = {"num_clients": 30, "partition": "shards:2", "loss": "cross-entropy", "epochs": 5, "global_lr": "local", "update": "sum"} | {
    "weighting": "uniform",
    "preset": "none",
    "dtype": "float32",
}
# docs/reproduce.md gives the reasons where the paper does not specify a value.
BASE: dict[str, dict[str, Any]] = {
    "fmnist": COMMON
    | {"dataset": "fmnist:standardise=false", "model": "lenet", "batch_size": 16, "lr": "geometric:0.01,0.95,floor=1e-05", "uploads": 200}
    | {"precision": "fp32", "eval_every": 1},
    "cifar10": COMMON
    | {"dataset": "cifar10", "model": "vgg11", "batch_size": 32, "lr": "geometric:0.01,0.99,floor=1e-05", "uploads": 400}
    | {"precision": "bf16", "eval_every": 4},
}
# Options of the algorithms that have any: FedProx's is chosen by the tuning studies, SCAFFOLD's is the paper's count of uploads.
TUNED: dict[str, dict[str, Any]] = {"fedprox": {"algorithm": "fedprox:mu=0.001"}, "scaffold": {"algorithm": "scaffold:uploads=2"}}


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    about: str
    dataset: str
    head: str  # name of what the columns vary
    columns: dict[str, dict[str, Any]]  # label -> settings
    algorithms: tuple[str, ...] = ALL
    published: Published = field(default_factory=dict)
    drawn: str = ""  # "curves": accuracy against uploads; "against": final accuracy against the columns
    claimed: bool = True  # whether the paper claims a ranking here
    first_seed: int = 0  # tuning uses separate seeds, so that nothing is tuned on the seeds of the tables

    def place(self, column: str) -> str:
        """`P = 10%`, or the column label if the columns have no common name."""
        return f"{self.head} = {column}" if self.head else column

    def experiment(self, column: str, algorithm: str, seed: int, scale: float = 1.0) -> Experiment:
        """The experiment of one cell and seed (counted from 0)."""
        settings = BASE[self.dataset] | {"algorithm": algorithm} | TUNED.get(algorithm, {}) | self.columns[column]
        return shortened(from_dict(settings | {"seed": self.first_seed + seed}, self.name).resolved(), scale)


def shortened(experiment: Experiment, scale: float) -> Experiment:
    """A shorter run for a quick check: fewer rounds and local epochs; the rate decays to the same final value."""
    if number("--scale", scale, low=0, high=1, open_low=True) == 1.0:
        return experiment
    uploads = max(2, round(scale * (experiment.uploads or 0)))
    epochs = max(1, round(scale * (experiment.epochs or 1)))
    changes: dict[str, Any] = {"uploads": uploads, "epochs": epochs, "eval_every": 1, "precision": "fp32"}  # CPUs support no other
    for name in ("lr", "global_lr"):
        kind, values, options = parse(str(getattr(experiment, name)))
        if kind == "geometric":
            floor = f",floor={options['floor']:g}" if "floor" in options else ""
            changes[name] = f"geometric:{values[0]:g},{values[1] ** ((experiment.uploads or 0) / uploads):.6g}{floor}"
    return dataclasses.replace(experiment, **changes)
