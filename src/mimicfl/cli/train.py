"""`run`, `resume`, `compare`, `demo`: the commands that train."""

import argparse
import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from .. import runner
from ..config import Experiment, coerce, from_dict
from ..metrics.history import History, read
from ..metrics.store import RunFolder, find_runs
from ..report.report import Report, build
from ..report.summary import Group, group, show, verdict
from ..report.tables import overview, overview_tables, table
from ..sweep import carry_out
from ..sweep import compare as run_compare
from ..sweep.fuse import plan_comparison
from ..sweep.grid import cells, read_sweep
from .console import notice
from .options import experiment, given
from .progress import Reporter

DEMO = {
    "dataset": "digits",
    "num_clients": 30,
    "partition": "classes:2",
    "availability": "label-correlated:classes=[0,1,2],rare=0.02,common=0.3",
    "uploads": 200,
}


def run(arguments: argparse.Namespace, console: Console) -> None:
    e, _ = runner.settle(experiment(arguments))
    out = arguments.folder = Path(arguments.out or Path("runs") / e.name)
    console.print(_announcement(e, out), soft_wrap=True)
    with Reporter(console) as progress:
        history = runner.run(e, out, progress, progress.notice)
    _finish(console, history, out)


def resume(arguments: argparse.Namespace, console: Console) -> None:
    folders = find_runs([arguments.run])
    arguments.folder = arguments.run
    waiting = [folder for folder in folders if not folder.finished]
    if not waiting:
        console.print(f"{arguments.run} is finished: nothing to do", soft_wrap=True)
    root, plugins = Path(arguments.run), given(arguments).get("plugins", [])
    _say_what_runs(waiting, plugins)
    heading = f"going on with {len(waiting)} runs in {root}" if len(waiting) > 1 else "".join(f"going on in {f.path}" for f in waiting)
    with Reporter(console, runs=len(waiting), heading=heading) as progress:
        if len(waiting) > 1:  # together, as they were begun
            plan = {str(f.path.relative_to(root)): runner.resumable(f, plugins) for f in waiting}
            carry_out(plan, root, progress, progress.notice)
        for folder in waiting if len(waiting) == 1 else []:
            runner.resume(folder.path, progress, progress.notice, plugins)
    for folder in folders:
        _finish(console, read(folder), folder.path)


def _say_what_runs(waiting: Sequence[RunFolder], plugins: Sequence[str]) -> None:
    """Resuming runs code: list the files before they are imported, since the run folder may name them."""
    own = [name for folder in waiting for name in coerce("plugins", folder.config.get("plugins", []), list[str])]
    if files := list(dict.fromkeys([*plugins, *own])):
        whose = "this run" if len(waiting) == 1 else "these runs"
        notice(f"importing the plugins of {whose}, which runs their code: {', '.join(files)}")


def compare(arguments: argparse.Namespace, console: Console) -> None:
    e = experiment(arguments, also=("algorithms", "seeds"))
    runner.load_plugins(e.plugins)
    names = runner.algorithm_list(arguments.algorithms or runner.ALL)
    _compare(arguments, console, e, names, runner.seed_list(arguments.seeds))


def demo(arguments: argparse.Namespace, console: Console) -> None:
    console.print(
        "Handwritten digits on 30 clients with two classes each. Who holds a 0, 1 or 2 answers in 2 % of the rounds, the others in 30 %."
    )
    arguments.out = arguments.out or "runs/demo"
    _compare(arguments, console, from_dict(DEMO), list(runner.ALL), [0, 1, 2])


def _compare(arguments: argparse.Namespace, console: Console, e: Experiment, names: list[str], seeds: list[int]) -> None:
    began = time.monotonic()
    target = arguments.folder = Path(arguments.out or Path("runs") / f"compare-{_digest(e, names, seeds)}")
    heading = f"{len(names)} algorithms x {len(seeds)} seed{'s' * (len(seeds) > 1)} into {target}"
    with Reporter(console, runs=len(names) * len(seeds), heading=heading) as progress:
        run_compare(e, names, seeds, target, progress, progress.notice)
    report = build([target / name for name in plan_comparison(e, names, seeds)], target)
    print_report(console, report)
    console.print(f"{time.monotonic() - began:.0f} s", style="dim")


def sweep(arguments: argparse.Namespace, console: Console) -> None:
    began = time.monotonic()
    plan = {name: dataclasses.replace(e, **given(arguments)) for name, e in read_sweep(arguments.file).items()}
    target = arguments.folder = Path(arguments.out or Path("runs") / Path(arguments.file).stem)
    with Reporter(console, list(plan.values()), heading=f"{len(plan)} runs into {target}") as progress:
        if arguments.ray:
            from ..sweep.cluster import carry_out_on

            carry_out_on(arguments.ray, plan, target, progress.notice)
        else:
            carry_out(plan, target, progress, progress.notice)
    reports = {cell: build([target / name for name in names], target / cell) for cell, names in cells(plan).items()}
    if print_overview(console, group([run for report in reports.values() for g in report.groups for run in g.runs])):
        console.print(f"see them on one page: mimicfl report {target}", soft_wrap=True)
    for cell, report in reports.items():
        if cell:
            console.print(f"\n{cell}", style="bold", soft_wrap=True)
        print_report(console, report)
    console.print(f"{time.monotonic() - began:.0f} s", style="dim")


def print_overview(console: Console, groups: Sequence[Group]) -> bool:
    """All settings at a glance, if there are several; whether there are."""
    found = overview(groups)
    for view in overview_tables(found, console.width) if found else []:
        console.print()
        console.print(view)
    return found is not None


def print_report(console: Console, report: Report) -> None:
    print_overview(console, report.groups)
    console.print()
    console.print(table(report.groups))
    console.print()
    console.print(verdict(report.groups), soft_wrap=True)
    if report.unfinished:
        console.print(report.unfinished, style="yellow", soft_wrap=True)
    console.print(f"report   {report.page}", soft_wrap=True)
    console.print(f"pictures {', '.join(str(p) for p in report.pictures)}", soft_wrap=True)


def _digest(e: Experiment, names: list[str], seeds: list[int]) -> str:
    return hashlib.sha256(json.dumps([e.id, names, seeds]).encode()).hexdigest()[:8]


def _announcement(e: Experiment, out: Path) -> str:
    length = " / ".join(f"{value} {word}" for word, value in (("rounds", e.rounds), ("uploads", e.uploads)) if value)
    parts = [f"{e.algorithm} on {e.dataset}", f"{e.num_clients} clients", e.availability, length, f"seed {e.seed}"]
    return ", ".join(filter(None, parts)) + f" -> {out}"  # an explicit schedule needs no length


def _finish(console: Console, history: History, out: Path) -> None:
    last = history.rows[-1]
    accuracy, loss = history.last("test_accuracy"), history.last("test_loss")
    result = "never tested" if loss is None else f"test loss {loss:.4g}"
    result = result if accuracy is None else f"test accuracy {show('test_accuracy', accuracy)}"
    up, down = (f"{last[f'vectors_{way}']} vectors ({last[f'bytes_{way}'] / 1e6:.3g} MB) {way}" for way in ("up", "down"))
    console.print(f"{result} after {last['round'] + 1} rounds, {last['uploads']} uploads; {up}, {down}", soft_wrap=True)
    console.print(f"see it: mimicfl report {out}", soft_wrap=True)
