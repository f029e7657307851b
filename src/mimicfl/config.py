"""`Experiment`: all settings of a run, with one meaning in TOML, on the command line and in Python.

Names of things (algorithms, patterns, ...) are text here, objects become it; `runner` turns them into objects. Settings left at "auto" take
the dataset's customary values in `resolved()`, and only resolved experiments are written to disk, so a later change of a
default cannot change an old run.
"""

import contextlib
import dataclasses
import hashlib
import json
import tomllib
import types
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from .errors import UsageError, fading, nearest, number, one_of, whole
from .registry import NAMED_BY, parse
from .text import without_nul

ENGINES = ("auto", "plain", "native", "workers", "batched", "streams")
MOST_LANES = {"batched": 4096, "streams": 16}  # beyond 16 streams nothing is gained, a large model's kernels fill the GPU
# Settings that say how or where a run is made, not what it is.
BESIDE_THE_POINT = ("device", "engine", "state_budget", "checkpoint_every", "diagnose", "data_path", "plugins")
MADE_BY = {"python": "Python objects", "flower": "a Flower federation"}  # `source` of runs that are not made of settings
CAME_LATER = ("weight_decay", "momentum", "clip_norm")
# What people use with each dataset: for Fashion-MNIST and CIFAR-10 the batch, the decaying rate and the length of the paper.
# (The paper's table gives a constant local rate; with `update="sum"` the local rate follows the global one, see docs/design.md.)
CUSTOMARY: dict[str, dict[str, Any]] = {
    "digits": {"model": "mlp", "lr": "geometric:0.1,0.99", "batch_size": 16, "uploads": 200},
    "fmnist": {"model": "lenet", "lr": "geometric:0.01,0.95", "batch_size": 16, "uploads": 200},
    "cifar10": {"model": "vgg11", "lr": "geometric:0.01,0.99", "batch_size": 32, "uploads": 400},
    "synthetic": {"model": "linear", "lr": "constant:0.01", "batch_size": 10, "uploads": 200, "partition": "natural"},
}
FALLBACK = {"model": "mlp", "lr": "constant:0.01", "batch_size": 16, "uploads": 200, "partition": "shards:2"}


def setting(default: Any, text: str, metavar: str = "") -> Any:
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": text, "metavar": metavar})
    return field(default=default, metadata={"help": text, "metavar": metavar})


@dataclass(frozen=True)
class Experiment:
    """Settings of one run; `Experiment(algorithm="mimic", rounds=50)`.

    Algorithm, availability and rates may be given as objects, `mf.MimiC()`, `mf.availability.Bounded(50)`, `mf.lr.geometric(0.1, 0.99)`;
    they are kept as the text that makes them again.
    """

    dataset: str = setting("digits", "digits, fmnist, cifar10, synthetic:logistic, ...", "NAME")
    data_path: str | None = setting(None, "folder that holds the dataset's files", "DIR")
    num_clients: int = setting(30, "number of clients", "N")
    partition: str = setting("auto", "shards:2, classes:5, anchored, dirichlet:0.3, iid, natural", "SPEC")
    model: str = setting("auto", "mlp, mlp:200,100, lenet, vgg11, logistic, linear", "SPEC")
    loss: str = setting("auto", "cross-entropy, binary, mse (half the mean squared error)", "NAME")
    algorithm: str = setting(
        "mimic", "fedavg, fedprox:mu=0.01, scaffold, mifa:never_seen=zero, mimic, fedvarp, fedau:cutoff=50, fedavgm:momentum=0.9", "SPEC"
    )
    availability: str = setting(
        "time-varying:0.1",
        "always, bounded:20, static:0.1, time-varying:0.1, markov:0.1,0.5, cyclic:20,4, label-correlated, explicit:FILE",
        "SPEC",
    )
    rounds: int | None = setting(None, "stop after so many rounds", "T")
    uploads: int | None = setting(None, "stop after so many model uploadings (SCAFFOLD uses 2 a round)", "U")
    epochs: int | None = setting(None, "local passes over a client's data (5 unless steps are given)", "E")
    steps: int | None = setting(None, "local steps, instead of epochs", "K")
    batch_size: int | str = setting("auto", "samples a local step, or 'full'", "B")
    lr: float | str = setting("auto", "local rate: 0.05, geometric:0.01,0.95, geometric:0.01,0.95,floor=1e-5, theory:c=0.1,beta=10", "RATE")
    global_lr: float | str = setting("local", "global rate, or 'local' to follow the local one", "RATE")
    weight_decay: float = setting(0.0, "of the clients' SGD: their steps follow the gradient + X w", "X")
    momentum: float = setting(0.0, "of the clients' SGD, as PyTorch means it; it begins at zero in every round", "X")
    clip_norm: float = setting(0.0, "of the clients' SGD: gradients longer than X are shortened to it; 0: never", "X")
    update: str = setting("sum", "g_i is the sum of the local gradients (model averaging) or their mean (the paper's formula)", "sum|mean")
    weighting: str = setting("uniform", "clients count equally or by their samples", "uniform|samples")
    preset: str = setting(
        "none",
        "'authors': memory in eta*g units, a rate floor of 1e-5 and the partition anchored, as in the script of the paper's authors",
        "none|authors",
    )
    seed: int = setting(0, "everything random follows from it", "S")
    device: str = setting("cpu", "cpu, cuda or auto", "NAME")
    engine: str = setting(
        "auto",
        "auto (the fastest that fits), plain, native or workers (CPU), batched or streams (GPU; batched:128:compiled fixes the lanes)",
        "NAME",
    )
    precision: str = setting("fp32", "of products on a GPU: fp32, tf32 or bf16", "NAME")
    dtype: str = setting("float32", "float32 or float64", "NAME")
    eval_every: int = setting(1, "test after every so many rounds", "R")
    diagnose: str = setting(
        "off", "look at every so many rounds how far the applied direction is from the true gradient: every=10, every=1,parts=false", "SPEC"
    )
    state_budget: str = setting("auto", "GiB for per-client state on the device, or there and in host memory: 4 or 4,16", "GIB")
    checkpoint_every: int = setting(0, "rounds between checkpoints; 0: as often as 5 %% of the time allows", "R")
    plugins: list[str] = setting([], "Python files or modules to import first (own algorithms, patterns, models, datasets)", "FILE")

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(Experiment).items():
            value = getattr(self, name)
            if name in NAMED_BY and not isinstance(value, (Real, types.NoneType)):
                value = NAMED_BY[name].spell(value)
            object.__setattr__(self, name, coerce(name, value, kind))
        whole("num_clients", self.num_clients)
        whole("seed", self.seed, low=0)
        for name in ("rounds", "uploads", "epochs", "steps", "eval_every"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name))
        whole("checkpoint_every", self.checkpoint_every, low=0)
        number("weight_decay", self.weight_decay, low=0)
        fading("momentum", self.momentum)
        number("clip_norm", self.clip_norm, low=0)
        if self.epochs is not None and self.steps is not None:
            raise UsageError("give epochs or steps, not both")
        if self.batch_size not in ("auto", "full"):
            whole("batch_size", self.batch_size)
        one_of("update", self.update, ["sum", "mean"])
        one_of("weighting", self.weighting, ["uniform", "samples"])
        one_of("preset", self.preset, ["none", "authors"])
        one_of("dtype", self.dtype, ["float32", "float64"])
        engine_parts(self.engine)
        one_of("precision", self.precision, ["fp32", "tf32", "bf16"])

    def resolved(self) -> "Experiment":
        """The same experiment with every "auto" filled in and the preset applied."""
        usual = FALLBACK | CUSTOMARY.get(parse(self.dataset)[0], {})
        changes: dict[str, Any] = {key: usual[key] for key in ("model", "partition", "batch_size", "lr") if getattr(self, key) == "auto"}
        if self.rounds is None and self.uploads is None and parse(self.availability)[0] != "explicit":
            changes["uploads"] = usual["uploads"]
        if self.epochs is None and self.steps is None:
            changes["epochs"] = 5
        if self.preset == "authors":
            changes |= self._authors(str(changes.get("lr", self.lr)))
        return dataclasses.replace(self, **changes)

    def _authors(self, lr: str) -> dict[str, Any]:
        """Memory in eta*g units, rates that stop falling at 1e-5, and the script's split where the clients are not given."""
        usual = (FALLBACK | CUSTOMARY.get(parse(self.dataset)[0], {}))["partition"]
        changes = {"partition": "anchored"} if self.partition == "auto" and usual != "natural" else {}
        if parse(self.algorithm)[0] in ("mimic", "mifa") and "memory" not in self.algorithm:
            changes["algorithm"] = self.algorithm + ("," if ":" in self.algorithm else ":") + "memory=step"
        for name, rate in (("lr", lr), ("global_lr", str(self.global_lr))):
            kind, values, options = parse(rate)
            if kind == "geometric" and len(values) < 3 and "floor" not in options:
                changes[name] = f"{rate},floor=1e-05"
        return changes

    def to_dict(self) -> dict[str, Any]:
        """As kept on disk; a setting that came later is there where it is used, so that runs without it are the same as before."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value or key not in CAME_LATER}

    @property
    def id(self) -> str:
        """The content hash of the settings that a result depends on."""
        own = {k: v for k, v in self.resolved().to_dict().items() if k not in BESIDE_THE_POINT}
        return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """A folder name a person can read, made unique by the id."""
        words = [parse(self.dataset)[0], self.algorithm, self.availability, f"s{self.seed}", self.id]
        return "-".join("".join(c if c.isalnum() or c in ".-" else "_" for c in word)[:40] for word in words)


def device_kind(device: str) -> str:
    """`cuda:1` is of the kind `cuda`."""
    return device.partition(":")[0]


def engine_parts(engine: str) -> tuple[str, int, bool]:
    """`batched:128:compiled` as name, lanes (0: as many as suit) and whether to compile."""
    if not isinstance(engine, str):
        raise UsageError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    name, *details = engine.split(":")
    one_of("engine", name, ENGINES)
    lanes, compiled = details[0] if details else "0", details[1:]
    if details and (
        name not in MOST_LANES or not lanes.isdecimal() or not 1 <= int(lanes) <= MOST_LANES[name] or compiled not in ([], ["compiled"])
    ):
        most = " and ".join(f"{engine} up to {most}" for engine, most in MOST_LANES.items())
        raise UsageError(f"engine {engine!r} cannot be read: lanes and the compiler are asked for as in batched:128:compiled ({most})")
    return name, int(lanes), bool(compiled)


SETTINGS = {f.name: f for f in dataclasses.fields(Experiment)}


def defaults() -> dict[str, Any]:
    """Every setting at its default, as TOML holds it (None is absent)."""
    return {key: value for key, value in dataclasses.asdict(Experiment()).items() if value is not None}


def with_later(config: dict[str, Any]) -> dict[str, Any]:
    """A run's settings as kept, and those that came later at their default where it has none of them."""
    return {key: SETTINGS[key].default for key in CAME_LATER} | config


def check_kept(config: dict[str, Any], where: str) -> None:
    """Refuse settings of a run folder whose type would break a reader; other settings are only displayed."""
    kinds: dict[str, tuple[Any, str]] = dict.fromkeys(("algorithm", "availability", "dataset", "source"), (str, "a string"))
    kinds |= dict.fromkeys(("seed", "num_clients"), (int, "a whole number")) | dict.fromkeys(CAME_LATER, ((int, float), "a number"))
    for key, (kind, expected) in kinds.items():
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise UsageError(f"{where}: {key} must be {expected}, got {value!r}; the file is damaged or was not written by mimicfl")


def from_dict(settings: dict[str, Any], where: str = "the settings") -> Experiment:
    """An experiment from plain settings; a name that does not exist is refused with the nearest that does."""
    if settings.get("source") in tuple(MADE_BY):  # not a lookup: a damaged file may hold a list there
        made = MADE_BY[settings["source"]]
        raise UsageError(f"{where} is of a run made of {made}, which no settings describe: it can only go on from there")
    clean = {}
    for key, value in settings.items():
        name = key.replace("-", "_")
        if name not in SETTINGS:
            raise UsageError(f"{where}: there is no setting {key!r}; {nearest(name, SETTINGS)}")
        clean[name] = value
    try:
        return Experiment(**clean)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def read_toml(file: str | Path) -> dict[str, Any]:
    """The settings in a TOML file, as they stand."""
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: too many digits or nested brackets, too
        raise UsageError(f"{file} is not valid TOML: {error}") from None


def read_settings(file: Path) -> dict[str, Any]:
    """A file's settings; plugins and data in it are found from where the file is, not from where the command runs."""
    settings: dict[str, Any] = {}
    for key, value in read_toml(file).items():
        name = key.replace("-", "_")
        if name in settings:
            raise UsageError(f"{file}: {key!r} is given twice")
        settings[name] = value
    if isinstance(settings.get("plugins"), list):
        settings["plugins"] = [str(file.parent / p) if str(p).endswith(".py") else p for p in settings["plugins"]]
    if isinstance(settings.get("data_path"), str):
        settings["data_path"] = str(file.parent / settings["data_path"])
    return settings


def coerce(name: str, value: Any, kind: Any) -> Any:
    """A value as the setting's type; command-line text becomes numbers where numbers are meant."""
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if value is None and type(None) in choices:
        return None
    if get_origin(choices[0]) is list:
        if isinstance(value, str):
            value = [part for part in value.split(",") if part]
        if not isinstance(value, (list, tuple)) or not all(isinstance(part, str) for part in value):
            raise UsageError(f"{name} must be a list of strings, got {value!r}")
        return [without_nul(name, part) for part in value]
    if isinstance(value, bool):
        raise UsageError(f"{name} cannot be {value!r}")
    if int in choices and isinstance(value, int):
        return value
    if int in choices and isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            if str not in choices:
                raise UsageError(f"{name} must be a whole number, got {value!r}") from None
    if float in choices:
        with contextlib.suppress(ValueError, TypeError, OverflowError):  # "0.05" and 0.05 are one rate; "geometric:..." is none of these
            return float(value)
    if str in choices and isinstance(value, str):
        return without_nul(name, value.strip())
    expected = {int: "a whole number", float: "a number", str: "a string"}[choices[0]]
    raise UsageError(f"{name} must be {expected}, got {value!r}")
