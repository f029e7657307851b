"""From settings to results: build what an experiment names, and run it."""

import collections
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import algorithms, availability
from .config import CAME_LATER, MADE_BY, Experiment, from_dict, with_later
from .data import partition
from .data.dataset import Data
from .data.datasets import DATASETS, load
from .engine.moment import EachRound
from .engine.pick import check_engine
from .engine.run import Run
from .engine.simulate import simulate
from .engine.watching import watch
from .errors import UsageError, check_callable, shown, whole
from .fingerprint import digest
from .local import models
from .local.update import LocalSGD
from .metrics import history
from .metrics.diagnostics import plan
from .metrics.history import History, Row
from .metrics.store import RunFolder, find_runs
from .registry import NAMED_BY, parse, split_at_commas

if TYPE_CHECKING:
    import pandas

ALL = ("fedavg", "fedprox", "scaffold", "mifa", "mimic")
FINGERPRINT = "_fingerprint"  # how the names of such columns end
Reporter = Callable[[Experiment, Row, int], None]


def build(experiment: Experiment) -> dict[str, Any]:
    """The arguments of `simulate` that the settings stand for; everything is checked before anything is written."""
    if not isinstance(experiment, Experiment):
        raise UsageError(f"settings must be an mf.Experiment, as in mf.run(mf.Experiment(rounds=50)), got {shown(experiment)}")
    e = experiment.resolved()
    load_plugins(e.plugins)
    algorithm = algorithms.make(e.algorithm)
    pattern = availability.make(e.availability)
    batch = None if e.batch_size == "full" else int(e.batch_size)
    local = LocalSGD(e.epochs, batch, e.lr, e.steps, **{key: getattr(e, key) for key in CAME_LATER})
    data = _data(e)
    labels = data.y_train if data.num_classes else data.y_train.new_zeros(len(data.y_train), dtype=torch.long)
    split = partition.PARTITIONS.make(e.partition, labels=labels, ids=data.ids, num_clients=e.num_clients, seed=e.seed)
    model = models.build(e.model, data, e.seed).to(getattr(torch, e.dtype))
    names = (
        "rounds",
        "uploads",
        "global_lr",
        "update",
        "weighting",
        "seed",
        "device",
        "engine",
        "eval_every",
        "precision",
        "state_budget",
        "diagnose",
    )
    return {
        "model": model,
        "data": data,
        "split": split,
        "algorithm": algorithm,
        "availability": pattern,
        "local": local,
        "loss": None if e.loss == "auto" else e.loss,
        "checkpoint_every": e.checkpoint_every or None,
        **{name: getattr(e, name) for name in names},
    }


def _data(e: Experiment) -> Data:
    """The experiment's data; runs that may share it get the same object."""
    factory = DATASETS.find(parse(e.dataset)[0])
    taken = inspect.signature(factory).parameters
    options = {key: getattr(e, key) for key in ("num_clients", "seed") if key in taken}
    data = _load(factory, e.dataset, e.data_path, **options)
    if data.changed():  # edited in place by the user: this must not affect other runs
        _load.cache_clear()
        data = _load(factory, e.dataset, e.data_path, **options)
    return data


@functools.lru_cache(maxsize=8)  # a comparison of many runs reads and verifies its data once
def _load(factory: Callable[..., Data], name: str, path: str | None, **options: Any) -> Data:
    """By the factory as well: a dataset that is registered anew is made anew."""
    return load(name, path, **options)


def settle(experiment: Experiment) -> tuple[Experiment, dict[str, Any]]:
    """The experiment as it will be written down, and the arguments it stands for, all checked before anything is begun."""
    e, arguments, _ = _settled(experiment)
    return e, arguments


def begin(experiment: Experiment) -> tuple[Experiment, Run]:
    """The settled experiment, and its run before the first round."""
    e, arguments, run = _settled(experiment)
    watch(run, arguments["diagnose"])
    run.config = e.to_dict()
    return e, run


def _settled(experiment: Experiment) -> tuple[Experiment, dict[str, Any], Run]:
    arguments = build(experiment)
    e = experiment.resolved()
    e = dataclasses.replace(
        e,
        num_clients=len(arguments["split"]),  # natural clients are as many as there are
        loss=arguments["data"].loss if e.loss == "auto" else e.loss,
        plugins=[_absolute(p) if p.endswith(".py") else p for p in e.plugins],
        data_path=e.data_path and _absolute(e.data_path),
        availability=_with_absolute_file(e.availability),
    )
    run = Run(**{key: value for key, value in arguments.items() if key not in ("engine", "checkpoint_every", "diagnose")})
    check_engine(e.engine, run.device)
    plan(arguments["diagnose"])
    return e, arguments, run


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    progress: Reporter | None = None,
    notice: Callable[[str], None] | None = None,
    each_round: EachRound | None = None,
) -> History:
    """Run an experiment; with `out`, in that folder, going on where it stopped. `each_round` as in `simulate`."""
    check_callable("progress", progress)
    settled, arguments = settle(experiment)
    tell = (lambda row, total: progress(settled, row, total)) if progress else None
    return simulate(**arguments, out=out, config=settled.to_dict(), progress=tell, notice=notice, each_round=each_round)


def resume(
    path: str | Path,
    progress: Reporter | None = None,
    notice: Callable[[str], None] | None = None,
    plugins: Sequence[str] = (),
) -> History:
    """Finish a stopped run; ends bit-equal to one that was never stopped."""
    return run(resumable(RunFolder(path), plugins), path, progress, notice)


def read(path: str | Path, plugins: Sequence[str] = ()) -> History:
    """A run from its folder, finished or not. Nothing that the folder names is executed.

    Only `model()` needs the run's data, and settings that name the model. A custom model or dataset must be registered first: import its
    module, or name its file in `plugins`.
    """
    folder = RunFolder(path)
    load_plugins(plugins)
    named = folder.config.get("source") not in MADE_BY
    return dataclasses.replace(history.read(folder), template=(lambda: _model(folder)) if named else None)


def frame(*paths: str | Path) -> "pandas.DataFrame":
    """Every round of every run below these folders as one data frame (needs pandas).

    Columns before the rows' own: `run` (the folder), `algorithm`, `availability`, `seed` and every other setting in which the runs
    differ. Where Python objects differ that no setting describes (a split, a model), a column such as `split_fingerprint` is added.
    """
    import pandas

    folders = find_runs(list(paths))
    histories = [history.read(folder) for folder in folders]
    settings = [_columns(folder.config, run.fingerprint.experiment) for folder, run in zip(folders, histories, strict=True)]
    differing = [key for key in dict.fromkeys(key for own in settings for key in own) if len({own.get(key) for own in settings}) > 1]
    hidden = [key for key in differing if key.endswith(FINGERPRINT) and _explained(key, differing, settings)]
    shown = list(dict.fromkeys(["algorithm", "availability", "seed", *[key for key in differing if key not in hidden]]))
    rows = [
        {"run": str(folder.path)} | {key: own.get(key) for key in shown} | row
        for folder, own, run in zip(folders, settings, histories, strict=True)
        for row in run.rows
    ]
    return pandas.DataFrame(rows)


def _columns(config: dict[str, Any], experiment: dict[str, str]) -> dict[str, Any]:
    """A run's settings, and the fingerprints of its parts, as values that can be compared."""
    plain = {key: str(value) if isinstance(value, (list, dict)) else value for key, value in with_later(config).items()}
    return plain | {part.replace(" ", "_") + FINGERPRINT: value[:8] for part, value in experiment.items()}


def _explained(part: str, differing: Sequence[str], settings: Sequence[dict[str, Any]]) -> bool:
    """Do the other settings already distinguish all runs that differ in this part?"""
    words = [key for key in differing if not key.endswith(FINGERPRINT) and key != "seed"]
    seen: dict[str, Any] = {}
    return all(seen.setdefault(repr([own.get(key) for key in words]), own.get(part)) == own.get(part) for own in settings)


def settings_of(folder: RunFolder) -> Experiment:
    """The experiment a folder holds."""
    if folder.config.get("source") == "python":
        again = f"call simulate(..., out={str(folder.path)!r}) again with the same arguments"
        raise UsageError(f"{folder.path} was started from Python with objects of its own: {again}")
    return from_dict(folder.config, str(folder.path / "config.toml"))


def resumable(folder: RunFolder, plugins: Sequence[str] = ()) -> Experiment:
    """The experiment to resume, once everything it names is registered; `plugins` replace those it was started with."""
    e = settings_of(folder)
    remedy = f"mimicfl resume {folder.path} --plugin FILE"
    # Beside the given ones those of its own that are still there: a folder of runs may have several.
    used = [*plugins, *(own for own in e.plugins if own not in plugins and (not plugins or not own.endswith(".py") or Path(own).exists()))]
    try:
        load_plugins(used)
    except UsageError as error:
        raise UsageError(str(error) if plugins else f"{error}; if it has moved: {remedy}") from None
    check_known(e, folder, f"give the file that registers it, {remedy}")
    return dataclasses.replace(e, plugins=used)


def check_known(e: Experiment, folder: RunFolder, remedy: str, settings: Iterable[str] | None = None) -> None:
    """What the settings of a run name was known when it began; where it is not now, it is no slip of the finger."""
    for setting in NAMED_BY if settings is None else settings:
        registry = NAMED_BY[setting]
        value = getattr(e.resolved(), setting)
        name = parse(value)[0] if isinstance(value, str) else ""
        if name and name not in (*registry.factories, "auto", "local"):
            raise UsageError(f"{folder.path} uses a custom {registry.kind}, {name!r}, which is not registered: {remedy}")


def _model(folder: RunFolder) -> nn.Module:
    e = settings_of(folder)
    files = f", mf.read({str(folder.path)!r}, plugins={e.plugins!r})" if e.plugins else ""
    check_known(
        e, folder, f"reading a run does not execute its plugins; import the module that registers it first{files}", ("model", "dataset")
    )
    return models.build(e.model, _data(e), e.seed).to(getattr(torch, e.dtype))


def folder_name(text: str, most: int = 100) -> str:
    """A spec as a folder name; a hash of the spec is added if characters had to be replaced."""
    name = "".join(c if c.isalnum() or c in ".-=" else "_" for c in text)
    lost = len(name) > most or any(c not in ".-=_:,[] " and not c.isalnum() for c in text)
    return f"{name[:most]}-{digest(text)[:8]}" if lost else name


def run_name(algorithm: str, seed: int) -> str:
    return f"{folder_name(algorithm)}-s{seed}"


def named_apart(pairs: Sequence[tuple[str, Experiment]]) -> dict[str, Experiment]:
    """Experiments by folder name; different experiments with the same name get a hash of their settings."""
    counts = collections.Counter(name for name, _ in pairs)
    return {name if counts[name] == 1 else f"{name}-{digest(e.to_dict())[:8]}": e for name, e in pairs}


def _split_specs(texts: Sequence[str]) -> list[str]:
    """`["fedavg,fedprox:mu=0.1,mimic"]` as three specs: a comma begins a new one where an algorithm's name follows it."""
    specs: list[str] = []
    for text in texts:
        for k, part in enumerate(split_at_commas(text)):
            if k == 0 or parse(part)[0] in algorithms.ALGORITHMS.factories or "=" not in part:
                specs.append(part.strip())
            else:
                specs[-1] += f",{part}"
    return [spec for spec in specs if spec]


def algorithm_list(given: Any) -> list[str]:
    """Algorithms as texts, each once; they may be given as names, objects or classes, many or one."""
    one = isinstance(given, (str, algorithms.Algorithm))
    if not one and not isinstance(given, Iterable):
        raise UsageError(f"algorithms must be a list such as ['fedavg', 'mimic'], got {given!r}")
    specs = _split_specs([algorithms.spell(each) for each in ([given] if one else _listed("algorithms", given))])
    return list({algorithms.ALGORITHMS.meaning(spec): spec for spec in reversed(specs)}.values())[::-1]  # two spellings are one algorithm


def _listed(what: str, values: Iterable[Any]) -> list[Any]:
    try:
        return list(values)
    except TypeError:  # a tensor or array of a single number can be asked, and refuses
        raise UsageError(f"{what} must be a list, got {shown(values)}") from None


def seed_list(seeds: Any) -> list[int]:
    """`3` is the seeds 0, 1, 2; `4,7` or a list is the seeds 4 and 7 (`4,` is the one seed 4); nothing is `3`."""
    if isinstance(seeds, Iterable) and not isinstance(seeds, str):
        return list(dict.fromkeys(whole("a seed", number, low=0) for number in _listed("seeds", seeds)))
    text = "3" if seeds is None else str(seeds)
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"seeds takes a count (3) or a list (0,5,7), got {text!r}") from None
    if "," not in text:
        return list(range(whole("seeds", numbers[0], high=10_000))) if numbers else []
    return list(dict.fromkeys(whole("a seed", number, low=0) for number in numbers))


def _absolute(path: str) -> str:
    return str(Path(path).resolve())


def _with_absolute_file(availability: str) -> str:
    """`explicit:FILE` must mean the same file when the run is resumed from another folder."""
    name, values, options = parse(availability)
    source = options.get("matrix", values[0] if values else None)
    if name != "explicit" or not isinstance(source, str):
        return availability
    return availability.replace(source, _absolute(source), 1)


def load_plugins(plugins: Sequence[str]) -> None:
    """Import the user's files and modules, whose `register(...)` lines then count."""
    for name in plugins:
        file = Path(name).resolve()
        if name.endswith(".py") and not file.is_file():
            raise UsageError(f"plugin {name} does not exist")
        if not name or (not name.endswith(".py") and file.exists()):
            raise UsageError(f"plugin {name!r} is neither a Python file, NAME.py, nor a module's name")
        try:
            _import_file(file) if name.endswith(".py") else importlib.import_module(name)
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
            line = f" in line {frames[-1].lineno}" if frames else f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise UsageError(f"plugin {name!r} cannot be imported: {type(error).__name__}{line}: {error}") from error


def _import_file(file: Path) -> None:
    label = f"mimicfl_plugin_{file.stem}"
    text = file.read_bytes()
    if (known := sys.modules.get(label)) is not None and getattr(known, "__plugin__", None) == (str(file), text):
        return  # an edited file is read again
    spec = importlib.util.spec_from_file_location(label, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[label] = importlib.util.module_from_spec(spec)
    module.__plugin__ = (str(file), text)  # type: ignore[attr-defined]
    try:
        exec(compile(text, str(file), "exec", dont_inherit=True), vars(module))  # not from a cached .pyc, which may be older than the file
    except BaseException:
        del sys.modules[label]
        raise
