"""From settings to results: build what an experiment names, run it, compare several."""

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import algorithms, availability
from .config import Experiment, from_dict
from .data import partition
from .data.datasets import load
from .engine.simulate import simulate
from .errors import UsageError
from .local import models
from .local.update import LocalSGD
from .metrics.history import History, Row
from .metrics.store import RunFolder
from .registry import parse

ALL = ("fedavg", "fedprox", "scaffold", "mifa", "mimic")
Reporter = Callable[[Experiment, Row, int], None]


def build(experiment: Experiment) -> dict[str, Any]:
    """The arguments of `simulate` that the settings stand for; everything is checked before anything is written."""
    e = experiment.resolved()
    load_plugins(e.plugins)
    algorithm = algorithms.make(e.algorithm)
    pattern = availability.make(e.availability)
    local = LocalSGD(e.epochs, None if e.batch_size == "full" else int(e.batch_size), e.lr, e.steps)
    data = load(e.dataset, e.data_path, num_clients=e.num_clients, seed=e.seed)
    labels = data.y_train if data.num_classes else data.y_train.new_zeros(len(data.y_train))
    split = partition.PARTITIONS.make(e.partition, labels=labels, ids=data.ids, num_clients=e.num_clients, seed=e.seed)
    model = models.build(e.model, data, e.seed).to(getattr(torch, e.dtype))
    names = ("rounds", "uploads", "global_lr", "update", "weighting", "seed", "device", "eval_every")
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


def run(experiment: Experiment, out: str | Path | None = None, progress: Reporter | None = None) -> History:
    """Run an experiment; with `out`, in that folder, going on where it stopped."""
    resolved = experiment.resolved()
    arguments = build(resolved)
    if out is not None and not portable(resolved):
        resolved = dataclasses.replace(resolved, plugins=[_absolute(p) for p in resolved.plugins])
    tell = (lambda row, total: progress(resolved, row, total)) if progress else None
    return simulate(**arguments, out=out, config=resolved.to_dict(), progress=tell)


def resume(path: str | Path, progress: Reporter | None = None) -> History:
    """Finish a stopped run; ends bit-equal to one that was never stopped."""
    folder = RunFolder(path)
    if folder.config.get("source") == "python":
        raise UsageError(
            f"{path} was started from Python with objects of its own: call simulate(..., out={str(path)!r}) again with the same arguments"
        )
    return run(from_dict(folder.config, str(folder.path / "config.toml")), path, progress)


def compare(
    experiment: Experiment,
    algorithms: Sequence[str] = ALL,
    seeds: Sequence[int] = (0, 1, 2),
    out: str | Path | None = None,
    progress: Reporter | None = None,
) -> dict[str, list[History]]:
    """Several algorithms and seeds on the same splits, availability and initial models; runs finished before are not run again."""
    plan = {(a, s): dataclasses.replace(experiment, algorithm=a, seed=s) for a in algorithms for s in seeds}
    if not plan:
        raise UsageError("compare needs at least one algorithm and one seed")
    for e in plan.values():
        build(e)  # a mistake in the last run must not surface after an hour of the first
    results: dict[str, list[History]] = {a: [] for a in algorithms}
    for (a, s), e in plan.items():
        results[a].append(run(e, None if out is None else Path(out) / folder_name(a, s), progress))
    return results


def folder_name(algorithm: str, seed: int) -> str:
    return "".join(c if c.isalnum() or c in ".-=" else "_" for c in algorithm) + f"-s{seed}"


def split_specs(texts: Sequence[str]) -> list[str]:
    """`["fedavg,fedprox:mu=0.1,mimic"]` as three specs: a comma begins a new one where an algorithm's name follows it."""
    specs: list[str] = []
    for text in texts:
        for k, part in enumerate(text.split(",")):
            if k == 0 or parse(part)[0] in algorithms.ALGORITHMS.factories or "=" not in part:
                specs.append(part.strip())
            else:
                specs[-1] += f",{part}"
    return list(dict.fromkeys(spec for spec in specs if spec))


def portable(experiment: Experiment) -> bool:
    return not any(p.endswith(".py") for p in experiment.plugins)


def _absolute(plugin: str) -> str:
    return str(Path(plugin).resolve()) if plugin.endswith(".py") else plugin


def load_plugins(plugins: Sequence[str]) -> None:
    """Import the user's files and modules, whose `register(...)` lines then count."""
    for name in plugins:
        if not name.endswith(".py"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                raise UsageError(f"plugin {name!r} cannot be imported: {error}") from None
            continue
        file = Path(name).resolve()
        if not file.is_file():
            raise UsageError(f"plugin {name} does not exist")
        label = f"mimicfl_plugin_{file.stem}"
        if getattr(sys.modules.get(label), "__file__", None) == str(file):
            continue
        spec = importlib.util.spec_from_file_location(label, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[label] = module
        try:
            spec.loader.exec_module(module)
        except SyntaxError as error:
            raise UsageError(f"plugin {name} has a syntax error in line {error.lineno}: {error.msg}") from None
