"""What a study is: a small table whose columns vary one setting, whose rows are algorithms, and whose cells are some seeds of one run.

No setting that matters is left to its default: a later change of one must not change what is found under a study's name.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..config import Experiment, from_dict
from ..errors import number
from ..registry import parse
from .published import Published

ALL = ("fedavg", "fedprox", "scaffold", "mifa", "mimic")
COMMON = {"num_clients": 30, "partition": "shards:2", "loss": "cross-entropy", "epochs": 5, "global_lr": "local", "update": "sum"} | {
    "weighting": "uniform",
    "preset": "none",
    "dtype": "float32",
}
# docs/reproduce.md says why each of these was chosen where the paper leaves it open.
BASE: dict[str, dict[str, Any]] = {
    "fmnist": COMMON
    | {"dataset": "fmnist:standardise=false", "model": "lenet", "batch_size": 16, "lr": "geometric:0.01,0.95,floor=1e-05", "uploads": 200}
    | {"precision": "fp32", "eval_every": 1},
    "cifar10": COMMON
    | {"dataset": "cifar10", "model": "vgg11", "batch_size": 32, "lr": "geometric:0.01,0.99,floor=1e-05", "uploads": 400}
    | {"precision": "bf16", "eval_every": 4},
}
# How each algorithm is called where it has something to choose; found by the studies that tune them.
TUNED: dict[str, dict[str, Any]] = {"fedprox": {"algorithm": "fedprox:mu=0.001"}}


@dataclass(frozen=True)
class Study:
    name: str
    title: str
    about: str
    dataset: str
    head: str  # what the columns say
    columns: dict[str, dict[str, Any]]  # label -> settings
    algorithms: tuple[str, ...] = ALL
    published: Published = field(default_factory=dict)
    drawn: str = ""  # "curves": accuracy against uploads; "against": final accuracy against the columns
    claimed: bool = True  # does the paper say who is first here?
    first_seed: int = 0  # tuning has seeds of its own, so that nothing is chosen by what it is then judged by

    def place(self, column: str) -> str:
        """`P = 10%`, or what the column says by itself."""
        return f"{self.head} = {column}" if self.head else column

    def experiment(self, column: str, algorithm: str, seed: int, scale: float = 1.0) -> Experiment:
        """The run of one cell and seed (counted from 0)."""
        settings = BASE[self.dataset] | {"algorithm": algorithm} | TUNED.get(algorithm, {}) | self.columns[column]
        return scaled(from_dict(settings | {"seed": self.first_seed + seed}, self.name).resolved(), scale)


def scaled(experiment: Experiment, scale: float) -> Experiment:
    """A shorter run for a quick look: fewer rounds and local epochs, and a rate that falls as far in them."""
    if number("--scale", scale, low=0, high=1, open_low=True) == 1.0:
        return experiment
    uploads = max(2, round(scale * (experiment.uploads or 0)))
    epochs = max(1, round(scale * (experiment.epochs or 1)))
    changes: dict[str, Any] = {"uploads": uploads, "epochs": epochs, "eval_every": 1, "precision": "fp32"}  # a CPU has no other
    for name in ("lr", "global_lr"):
        kind, values, options = parse(str(getattr(experiment, name)))
        if kind == "geometric":
            floor = f",floor={options['floor']:g}" if "floor" in options else ""
            changes[name] = f"geometric:{values[0]:g},{values[1] ** ((experiment.uploads or 0) / uploads):.6g}{floor}"
    return dataclasses.replace(experiment, **changes)
