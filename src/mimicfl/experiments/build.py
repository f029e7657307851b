"""From settings to a run: build every object that an experiment names."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import algorithms, participation
from ..clients import models
from ..clients.local import Local
from ..data import partition
from ..data.dataset import Data
from ..data.datasets import DATASETS, load
from ..data.holdout import held_out
from ..engines.select import check_engine
from ..errors import UsageError, shown
from ..plugins import load_plugins
from ..problem import Problem
from ..registry import parse
from ..settings import Experiment, arguments_of, settings_of
from ..simulation.diagnose import attach_diagnostics
from ..simulation.run import Run
from ..simulation.setup import set_up
from ..tasks import LearningTask

Problems = dict[tuple[Any, ...], Problem]  # by everything that they are made from, except the local training


def build(experiment: Experiment, made: Problems | None = None) -> tuple[Experiment, Run]:
    """The experiment with everything filled in, as it will be stored, and its run before the first round.

    Runs that are built with the same `made` share model, data and split where these are equal.
    """
    if not isinstance(experiment, Experiment):
        raise UsageError(f"settings must be an mf.Experiment, as in mf.run(mf.Experiment(rounds=50)), got {shown(experiment)}")
    load_plugins(experiment.plugins)  # first: what settings mean may depend on what plugins register
    e = experiment.resolved()
    parts = {"algorithm": algorithms.make(e.algorithm), "availability": participation.make(e.availability)}  # before data is read
    problem = build_problem(e, made)
    run = set_up(problem, vars(e) | parts)
    check_engine(e.engine, problem.device)
    attach_diagnostics(run, e.diagnose)
    files: dict[str, Any] = {name: _with_absolute_file(getattr(e, name)) for name in ("availability", "speed", "bandwidth")}
    e = dataclasses.replace(
        e,
        num_clients=len(problem.split),  # a natural split has as many clients as the data
        **resolved_loss(e, problem),
        plugins=[_absolute(p) if p.endswith(".py") else p for p in e.plugins],
        data_path=e.data_path and _absolute(e.data_path),
        **files,
    )
    run.config = e.to_dict()
    return e, run


def resolved_loss(e: Experiment, problem: Problem) -> dict[str, Any]:
    """The loss, or the task with its metrics, where the settings leave them to the data."""
    if isinstance(problem.loss, LearningTask):
        return {"task": problem.loss.name, "metrics": ",".join(metric.name for metric in problem.loss.metrics)}
    return {"loss": str(problem.data.loss) if e.loss == "auto" else e.loss}


def build_problem(e: Experiment, made: Problems | None = None) -> Problem:
    """Model, data, split and local training that resolved settings name."""
    local = Local(**arguments_of(Local, e) | {"batch_size": None if e.batch_size == "full" else int(e.batch_size)})
    if made is None:
        return _new_problem(e, local)
    key = tuple(repr(getattr(e, name)) for name in (*MADE_FROM, *settings_of(Problem.of)))
    if key not in made:
        made[key] = _new_problem(e, local)
    return made[key].with_local(local)


MADE_FROM = ("dataset", "data_path", "validation", "num_clients", "partition", "seed", "model", "dtype", "plugins")


def _new_problem(e: Experiment, local: Local) -> Problem:
    data = load_data(e)
    labels = data.y_train if data.num_classes else torch.zeros(data.num_train, dtype=torch.long)
    split = partition.PARTITIONS.make(e.partition, labels=labels, ids=data.ids, num_clients=e.num_clients, seed=e.seed)
    model = models.build(e.model, data, e.seed).to(getattr(torch, e.dtype))
    objects = {"model": model, "data": data, "split": split, "local": local}
    objects |= {key: None if (value := getattr(e, key)) == "auto" else value for key in ("loss", "task", "metrics")}
    return Problem.of(**arguments_of(Problem.of, e) | objects)


def load_data(e: Experiment) -> Data:
    """The experiment's data; runs that may share it get the same object."""
    factory = DATASETS.find(parse(e.dataset)[0])
    taken = inspect.signature(factory).parameters
    options = {key: getattr(e, key) for key in ("num_clients", "seed") if key in taken}
    data = _unchanged(_load, factory, e.dataset, e.data_path, **options)
    return _unchanged(_held_out, data, e.validation) if e.validation else data


def _unchanged(source: Any, *arguments: Any, **options: Any) -> Data:
    """Data from a cache, made again if the user edited it in place: this must not affect other runs."""
    data: Data = source(*arguments, **options)
    if data.changed():
        source.cache_clear()
        data = source(*arguments, **options)
    return data


@functools.lru_cache(maxsize=8)  # a comparison of many runs reads and verifies its data once
def _load(factory: Callable[..., Data], name: str, path: str | None, **options: Any) -> Data:
    """Keyed by the factory as well: a dataset that is registered again is loaded again."""
    return load(name, path, **options)


_held_out = functools.lru_cache(maxsize=8)(held_out)  # runs that may share their data get the same object


def _absolute(path: str) -> str:
    return str(Path(path).resolve())


FILE_OPTION = {"explicit": "matrix", "trace": "file", "file": "file"}  # of specs that name a file


def _with_absolute_file(spec: str) -> str:
    """`explicit:FILE` must mean the same file when the run is resumed from another folder."""
    name, values, options = parse(spec)
    source = options.get(FILE_OPTION.get(name, ""), values[0] if values else None)
    if name not in FILE_OPTION or not isinstance(source, str):
        return spec
    return spec.replace(source, _absolute(source), 1)
