"""`Experiment`: all settings of a run, with one meaning in TOML, on the command line and in Python.

Algorithms, patterns and rates are specs here (`fedprox:mu=0.1`); `experiments.build` makes the objects. `resolved()` replaces every "auto"
by the dataset's default. Only resolved experiments are stored, so a later change of a default cannot change an old run.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, get_type_hints

from ..errors import UsageError, integer, one_of, unit_interval
from ..registry import NAMED_BY, parse
from .declare import batch, coerce, engine_name, non_negative, non_negative_integer, setting, zero_or_at_least_one

# For Fashion-MNIST and CIFAR-10 the batch size, the decaying rate and the length of the paper.
# (The paper's table gives a constant local rate; with `update="sum"` the local rate follows the global one, see docs/design.md.)
USUAL_FOR: dict[str, dict[str, Any]] = {
    "digits": {"model": "mlp", "lr": "geometric:0.1,0.99", "batch_size": 16, "uploads": 200},
    "fmnist": {"model": "lenet", "lr": "geometric:0.01,0.95", "batch_size": 16, "uploads": 200},
    "cifar10": {"model": "vgg11", "lr": "geometric:0.01,0.99", "batch_size": 32, "uploads": 400},
    "mnist-writers": {"model": "lenet", "lr": "geometric:0.01,0.95", "batch_size": 16, "uploads": 200, "partition": "natural"},
    "sotu": {"model": "transformer", "lr": "constant:0.1", "batch_size": 16, "uploads": 200, "partition": "natural"},
    "synthetic": {"model": "linear", "lr": "constant:0.01", "batch_size": 10, "uploads": 200, "partition": "natural"},
}
# SCAFFOLD counted two uploads when these ids were first given: they keep their meaning, and today's default has a new id.
FORMERLY = {"scaffold:uploads=2": "scaffold", "scaffold": "scaffold:uploads=1"}
USUAL = {"model": "mlp", "lr": "constant:0.01", "batch_size": 16, "uploads": 200, "partition": "shards:2"}


@dataclass(frozen=True)
class Experiment:
    """Settings of one run: `Experiment(algorithm="mimic", rounds=50)`.

    Algorithm, availability and rates may be given as objects: `mf.MimiC()`, `mf.availability.Bounded(50)`, `mf.lr.geometric(0.1, 0.99)`.
    They are stored as specs, from which they can be rebuilt.
    """

    dataset: str = setting("digits", "dataset", "NAME")
    data_path: str | None = setting(None, "folder with the dataset's files", "DIR", part_of_result=False)
    num_clients: int = setting(30, "number of clients", "N", check=integer)
    validation: float = setting(
        0.0,
        "hold out this share of the training samples and evaluate on them instead of the test samples, for tuning",
        "X",
        check=unit_interval,
        stored_at_default=False,
    )
    partition: str = setting("auto", "how the samples are split among the clients", "SPEC")
    model: str = setting("auto", "model (mlp:200,100 has two hidden layers)", "SPEC")
    loss: str = setting("auto", "loss (mse is half the mean squared error)", "NAME")
    task: str = setting(
        "auto",
        "learning task, instead of a loss: it determines the loss, how outputs are interpreted, and the metrics",
        choices=("auto", "classification", "token-prediction", "regression", "multi-label"),
        stored_at_default=False,
    )
    metrics: str = setting(
        "auto",
        "metrics of the task, separated by commas: accuracy, balanced-accuracy, macro-f1, perplexity, rmse, auroc",
        "NAMES",
        stored_at_default=False,
    )
    algorithm: str = setting("mimic", "federated algorithm", "SPEC")
    availability: str = setting("time-varying:0.1", "which clients are available in which round", "SPEC")
    select: str = setting("all", "which of the available clients are selected", "SPEC", stored_at_default=False)
    deadline: float = setting(
        0.0, "virtual seconds after which the server stops waiting for clients; 0: none", "S", check=non_negative, stored_at_default=False
    )
    speed: str = setting("none", "samples per virtual second that clients train on: none, a number, or", "SPEC", stored_at_default=False)
    bandwidth: str = setting("none", "clients' Mbit per virtual second, up and down: none, a number, or", "SPEC", stored_at_default=False)
    asynchronous: int = setting(
        0,
        "asynchronous training: the server steps after this many arrivals; 0: synchronous rounds",
        "K",
        check=non_negative_integer,
        stored_at_default=False,
    )
    concurrency: int = setting(
        0,
        "asynchronous training: how many clients train at once; 0: all that are available",
        "M",
        check=non_negative_integer,
        stored_at_default=False,
    )
    participation_rates: str = setting(
        "known",
        "participation rates for algorithms that need them: known from the availability, or estimated from past rounds",
        choices=("known", "estimated"),
        stored_at_default=False,
    )
    rounds: int | None = setting(None, "stop after this many rounds", "T", check=integer)
    uploads: int | None = setting(None, "stop after this many model uploads, one per vector that a client sends", "U", check=integer)
    epochs: int | None = setting(None, "local passes over a client's data per round (5 unless steps are given)", "E", check=integer)
    steps: int | None = setting(None, "local steps per round, instead of epochs", "K", check=integer)
    batch_size: int | str = setting("auto", "samples per local step, or 'full'", "B", check=batch)
    lr: float | str = setting("auto", "local learning rate: a number, or a schedule such as geometric:0.01,0.95,floor=1e-5", "RATE")
    global_lr: float | str = setting("local", "global learning rate, or 'local' to follow the local one", "RATE")
    server_optimizer: str = setting("none", "how the server applies the algorithm's direction: none, or", "SPEC", stored_at_default=False)
    average: float = setting(
        0.0,
        "evaluate and return a running mean of the global models, over about the last 1/A of the rounds; training is unchanged; 0: off",
        "A",
        check=zero_or_at_least_one,
        stored_at_default=False,
    )
    optimizer: str = setting("sgd", "the clients' optimizer, reset in every round", "SPEC", stored_at_default=False)
    weight_decay: float = setting(0.0, "weight decay of the clients' optimizer", "X", check=non_negative, stored_at_default=False)
    momentum: float = setting(
        0.0, "momentum of the clients' SGD, reset to zero in every round", "X", check=unit_interval, stored_at_default=False
    )
    clip_norm: float = setting(
        0.0, "clip the clients' gradients to this norm; 0: no clipping", "X", check=non_negative, stored_at_default=False
    )
    update: str = setting(
        "sum",
        "clients send the sum of their gradients (model averaging) or their mean (the paper's formula)",
        choices=("sum", "mean"),
    )
    weighting: str = setting("uniform", "weight clients equally or by their number of samples", choices=("uniform", "samples"))
    preset: str = setting(
        "none",
        "'authors': memory in eta*g units, a learning-rate floor of 1e-5, partition anchored, as in the script of the paper's authors",
        choices=("none", "authors"),
    )
    seed: int = setting(0, "fixes split, initial model, schedule and batches", "S", check=non_negative_integer)
    device: str = setting("cpu", "cpu, cuda, cuda:1, ... or auto", "NAME", part_of_result=False)
    engine: str = setting(
        "auto",
        "auto: fastest by trial; plain; native; workers (CPU only); batched; streams (GPU only); batched:128:compiled fixes the lanes",
        "NAME",
        check=engine_name,
        part_of_result=False,
    )
    precision: str = setting("fp32", "precision of matrix products and convolutions on a GPU", choices=("fp32", "tf32", "bf16"))
    dtype: str = setting("float32", "type of the model's parameters", choices=("float32", "float64"))
    eval_every: int = setting(1, "rounds between evaluations", "R", check=integer)
    diagnose: str = setting(
        "off",
        "compare the applied direction with the true gradient: every=10, or every=1,parts=false",
        "SPEC",
        part_of_result=False,
    )
    state_budget: str = setting(
        "auto", "GiB for per-client state on the device, or on the device and in host memory: 4 or 4,16", "GIB", part_of_result=False
    )
    checkpoint_every: int = setting(
        0,
        "rounds between checkpoints; 0: as often as possible within 5 % of the running time",
        "R",
        check=non_negative_integer,
        part_of_result=False,
    )
    plugins: list[str] = setting(
        [], "Python file or module to import first (custom algorithms, patterns, models, datasets)", "FILE", part_of_result=False
    )

    def __post_init__(self) -> None:
        for name, kind in _types().items():
            value = getattr(self, name)
            if name in NAMED_BY and not isinstance(value, (Real, types.NoneType)):
                value = NAMED_BY[name].spell(value)
            value = coerce(name, value, kind)
            check(name, value)
            object.__setattr__(self, name, value)
        if self.epochs is not None and self.steps is not None:
            raise UsageError("give epochs or steps, not both")

    def resolved(self) -> "Experiment":
        """The same experiment with every "auto" filled in and the preset applied."""
        usual = USUAL | USUAL_FOR.get(parse(self.dataset)[0], {})
        changes: dict[str, Any] = {key: usual[key] for key in ("model", "partition", "batch_size", "lr") if getattr(self, key) == "auto"}
        if self.rounds is None and self.uploads is None and parse(self.availability)[0] != "explicit":
            changes["uploads"] = usual["uploads"]
        if self.epochs is None and self.steps is None:
            changes["epochs"] = 5
        if self.preset == "authors":
            changes |= self._authors(str(changes.get("lr", self.lr)))
        return dataclasses.replace(self, **changes) if changes else self

    def _authors(self, lr: str) -> dict[str, Any]:
        """Memory in eta*g units, rates that stop decaying at 1e-5, and the script's split if the data does not define the clients."""
        usual = (USUAL | USUAL_FOR.get(parse(self.dataset)[0], {}))["partition"]
        changes = {"partition": "anchored"} if self.partition == "auto" and usual != "natural" else {}
        name, _, given = parse(self.algorithm)
        declared = vars(NAMED_BY["algorithm"].factories.get(name, object))  # a subclass of it is another algorithm
        option = declared.get("authors", "") if declared.get("paper_rank") else ""
        if option and option.partition("=")[0] not in given:
            changes["algorithm"] = self.algorithm + ("," if ":" in self.algorithm else ":") + option
        for name, rate in (("lr", lr), ("global_lr", str(self.global_lr))):
            kind, values, options = parse(rate)
            if kind == "geometric" and len(values) < 3 and "floor" not in options:
                changes[name] = f"{rate},floor=1e-05"
        return changes

    def to_dict(self) -> dict[str, Any]:
        """The settings as stored on disk."""
        values = dataclasses.asdict(self).items()
        return {key: value for key, value in values if key not in ADDED_LATER or value != SETTINGS[key].default}

    @property
    def id(self) -> str:
        """The hash of the settings that the result depends on."""
        own = {k: v for k, v in self.resolved().to_dict().items() if k not in NOT_IN_RESULT}
        own["algorithm"] = FORMERLY.get(own["algorithm"], own["algorithm"])
        return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """A readable folder name, made unique by the id."""
        words = [parse(self.dataset)[0], FORMERLY.get(self.algorithm, self.algorithm), self.availability, f"s{self.seed}", self.id]
        return "-".join("".join(c if c.isalnum() or c in ".-" else "_" for c in word)[:40] for word in words)


@functools.cache  # a benchmark makes thousands of experiments
def _types() -> dict[str, Any]:
    return get_type_hints(Experiment)


SETTINGS = {f.name: f for f in dataclasses.fields(Experiment)}
NOT_IN_RESULT = tuple(name for name, f in SETTINGS.items() if not f.metadata["part_of_result"])
ADDED_LATER = tuple(name for name, f in SETTINGS.items() if not f.metadata["stored_at_default"])


def check(name: str, value: Any) -> Any:
    """A setting's value, checked as declared; also for values that reach Python functions directly."""
    declared = SETTINGS[name].metadata
    if value is None and SETTINGS[name].default is None:
        return None
    if declared["choices"]:
        return one_of(name, value, declared["choices"])
    return declared["check"](name, value) if declared["check"] else value


def settings_of(function: Callable[..., Any]) -> list[str]:
    """The names of the settings that a function has parameters for."""
    return [name for name in inspect.signature(function).parameters if name in SETTINGS]


def arguments_of(function: Callable[..., Any], given: Experiment | Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a function has parameters for, from an experiment, or from the arguments of `simulate`, which are checked here."""
    values = {name: given[name] if isinstance(given, Mapping) else getattr(given, name) for name in settings_of(function)}
    return {name: check(name, value) for name, value in values.items()}


def help_of(name: str) -> str:
    """The --help text of a setting: its description, the names it accepts, its default."""
    declared, registry = SETTINGS[name], NAMED_BY.get(name)
    names = f": {', '.join(registry.examples())}" if registry is not None and not name.endswith("lr") else ""
    default = declared.default if isinstance(declared.default, (str, int, float)) else None
    shown = (
        "" if default is None else " (default: depends on the dataset)" if default == "auto" and name in USUAL else f" (default {default})"
    )
    return f"{declared.metadata['help']}{names}{shown}".replace("%", "%%")


def defaults() -> dict[str, Any]:
    """Every setting at its default, as TOML holds it (None is absent)."""
    return {key: value for key, value in dataclasses.asdict(Experiment()).items() if value is not None}


def with_added_later(config: dict[str, Any]) -> dict[str, Any]:
    """A run's settings, with the defaults of settings that it does not store."""
    return {key: SETTINGS[key].default for key in ADDED_LATER} | config
