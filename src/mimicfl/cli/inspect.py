"""`report`, `config`, `data` and `bench`: the commands that do not train."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..data.datasets import ABOUT, FETCHABLE, cached, obtain
from ..engines.bench import bench as measure
from ..errors import UsageError, integer, one_of
from ..metrics.environment import environment
from ..plugins import load_plugins
from ..report.report import write_report
from ..report.targets import target_table
from ..settings import USUAL, Experiment, help_of
from ..toml import dumps
from . import paper
from .live import follow
from .options import experiment, given, in_file
from .train import print_report


def report(arguments: argparse.Namespace, console: Console) -> None:
    if arguments.paper:
        return paper.report(arguments, console)
    if not arguments.runs:
        raise UsageError("name the runs, as in 'mimicfl report runs/demo'")
    if arguments.live:
        made = follow(console, arguments.runs, arguments.out, arguments.every)
    else:
        made = write_report(arguments.runs, arguments.out)
    costs = [] if arguments.target is None else [target_table(made.groups, arguments.target)]
    print_report(console, made)
    return console.print("", *costs, sep="\n") if costs else None


def config(arguments: argparse.Namespace, console: Console) -> None:
    """Every setting, resolved, with one comment that describes it and one that says where its value comes from."""
    e = experiment(arguments)
    load_plugins(e.plugins)
    stored = dataclasses.asdict(e.resolved())
    own, written = given(arguments), in_file(arguments)
    for name, value in stored.items():
        comment = f"# {help_of(name)}".replace("%%", "%")
        line = f"# {name} is not set" if value is None else f"{dumps({name: value}).rstrip()}  # {_origin(name, value, e, own, written)}"
        console.print(f"{comment}\n{line.replace('(FILE)', f'({arguments.file})')}\n", soft_wrap=True, markup=False, highlight=False)


def _origin(name: str, value: object, e: Experiment, own: dict[str, Any], written: dict[str, Any]) -> str:
    """Where a resolved value comes from."""
    asked = getattr(e, name)
    if value != asked and e.preset != "none" and value != getattr(dataclasses.replace(e, preset="none").resolved(), name):
        return f"set by preset {e.preset}"
    if value != asked:
        return f"default for {e.dataset}" if name in USUAL else "default"
    return "given as an option" if name in own else "from the file (FILE)" if name in written else "default"


def data(arguments: argparse.Namespace, console: Console) -> None:
    if arguments.action == "list":
        for name, about in ABOUT.items():
            where = "" if name not in FETCHABLE else f"  [{'in ' + str(cached(name)) if cached(name).is_file() else 'not downloaded yet'}]"
            console.print(f"{name:10} {about}{where}", soft_wrap=True)
        return
    if not arguments.name:
        raise UsageError(f"name a dataset to fetch, as in mimicfl data fetch {sorted(FETCHABLE)[1]}")
    name = one_of("dataset", arguments.name, ABOUT)
    if name not in FETCHABLE:
        console.print(f"{name} is included in the package or generated; there is nothing to download")
        return
    arrays = obtain(name, Path(arguments.path) if arguments.path else None)
    images = f"{len(arrays['x_train']):,} training and {len(arrays['x_test']):,} test images" if "x_train" in arrays else ""
    sizes = images or f"{len(arrays['lengths']):,} texts"
    console.print(f"{name}: {sizes}, verified, in {cached(name)}", soft_wrap=True)


def bench(arguments: argparse.Namespace, console: Console) -> None:
    if arguments.threads is not None:
        torch.set_num_threads(integer("--threads", arguments.threads, high=1024))
    try:
        cohorts = [int(word) for word in arguments.cohorts.split(",")]
    except ValueError:
        raise UsageError(f"--cohorts takes numbers such as 3,30, got {arguments.cohorts!r}") from None
    here = environment()
    timings, words = measure(
        arguments.model,
        arguments.batch_size,
        arguments.steps,
        cohorts,
        arguments.repeats,
        arguments.device,
        arguments.precision,
        arguments.engines or "",
    )
    gpu = f"{here['gpu']}, " if arguments.device != "cpu" and here.get("gpu") else ""
    console.print(f"{gpu}{here['processor']}, {here['threads']} threads, torch {here['torch']}, python {here['python']}", soft_wrap=True)
    for sentence in words:
        console.print(sentence, soft_wrap=True)
    console.print(
        f"{arguments.model}, batch {arguments.batch_size}, {arguments.precision}: us of wall time per client-step, median (lowest-highest)"
    )
    bare = {t.cohort: t.median for t in timings if t.engine == "bare"}
    for t in timings:
        ratio = f"{bare[t.cohort] / t.median:6.1f}x bare" if t.engine != "bare" else ""
        ratio += f", off by {t.difference:.0e}" if t.engine not in ("bare", "plain") else ""
        peak = f"  {t.memory:6.0f} MiB" if t.memory else ""
        speed = f"({t.lowest:.1f}-{t.highest:.1f})  {t.rounds:8.2f} rounds/s{peak}"
        console.print(f"  cohort {t.cohort:3}  {t.engine:8} {t.median:9.1f}  {speed}  {ratio}".rstrip(), soft_wrap=True)
