"""`run`, `resume`, `compare` and `demo`: the commands that train; `sweep` is in `sweeping`."""

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..algorithms import paper_algorithms
from ..callbacks import make as make_tracker
from ..callbacks import send
from ..errors import UsageError
from ..experiments.build import build
from ..experiments.execute import build_all, plan_comparison, run_built, run_plan
from ..experiments.forecast import forecast
from ..experiments.names import algorithm_list, seed_list
from ..experiments.results import resumable
from ..metrics.columns import shown_primary
from ..metrics.history import History, read
from ..metrics.store import RunFolder, find_runs
from ..plugins import load_plugins
from ..registry import parse
from ..report.rates import best_rates, rate_setting
from ..report.report import Report, write_report
from ..report.summary import Group
from ..report.tables import overview, overview_tables, rates_table, table
from ..report.verdict import RULE, verdict
from ..settings import Experiment, coerce, from_dict
from ..text import counted
from .console import notice
from .dry_run import print_forecast
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
    trackers = [make_tracker(spec) for spec in arguments.track]
    e, prepared = build(experiment(arguments))
    out = arguments.folder = Path(arguments.out) if arguments.out else default_folder(e)
    if arguments.dry_run:
        return print_forecast(console, forecast({"": (e, prepared)}, out), out)
    console.print(_announcement(e, out), soft_wrap=True)
    with Reporter(console) as progress:
        [history] = run_built({"": (e, prepared)}, out, progress, progress.notice, callbacks=trackers, ray=arguments.ray).values()
    return _finish(console, history, out)


def resume(arguments: argparse.Namespace, console: Console) -> None:
    folders = find_runs([arguments.run])
    arguments.folder = arguments.run
    waiting = [folder for folder in folders if not folder.finished]
    if not waiting:
        console.print(f"{arguments.run} is finished: nothing to do", soft_wrap=True)
    root, plugins = Path(arguments.run), given(arguments).get("plugins", [])
    _announce_plugins(waiting, plugins)
    heading = f"resuming {len(waiting)} runs in {root}" if len(waiting) > 1 else "".join(f"resuming {f.path}" for f in waiting)
    with Reporter(console, runs=len(waiting), heading=heading) as progress:
        if waiting:  # together, as they were started
            plan = {"" if f.path == root else str(f.path.relative_to(root)): resumable(f, plugins) for f in waiting}
            trackers = [make_tracker(spec) for spec in arguments.track]
            run_plan(plan, root, progress, progress.notice, callbacks=trackers, ray=arguments.ray)
    for folder in folders:
        _finish(console, read(folder), folder.path)


def _announce_plugins(waiting: Sequence[RunFolder], plugins: Sequence[str]) -> None:
    """Resuming runs code: list the files before they are imported, since the run folder may name them."""
    own = [name for folder in waiting for name in coerce("plugins", folder.config.get("plugins", []), list[str])]
    if files := list(dict.fromkeys([*plugins, *own])):
        whose = "this run" if len(waiting) == 1 else "these runs"
        notice(f"importing the plugins of {whose}, which runs their code: {', '.join(files)}")


def compare(arguments: argparse.Namespace, console: Console) -> None:
    e = experiment(arguments, also=("algorithms", "seeds"))
    load_plugins(e.plugins)
    names = algorithm_list(arguments.algorithms or paper_algorithms())
    _compare(arguments, console, e, names, seed_list(arguments.seeds))


def demo(arguments: argparse.Namespace, console: Console) -> None:
    console.print(
        "Handwritten digits on 30 clients, two classes each. "
        "Clients that hold digits 0-2 participate in 2 % of the rounds, the others in 30 %."
    )
    arguments.out, arguments.dry_run, arguments.track, arguments.ray = arguments.out or "runs/demo", False, [], ""
    _compare(arguments, console, from_dict(DEMO), list(paper_algorithms()), [0, 1, 2])


def _compare(arguments: argparse.Namespace, console: Console, e: Experiment, names: list[str], seeds: list[int]) -> None:
    began = time.monotonic()
    trackers = [make_tracker(spec) for spec in arguments.track]
    target = arguments.folder = Path(arguments.out or Path("runs") / _compare_name(e, names, seeds))
    plan = plan_comparison(e, names, seeds)
    if arguments.dry_run:
        return print_forecast(console, forecast(build_all(plan), target), target)
    heading = f"{counted(len(names), 'algorithm')} x {counted(len(seeds), 'seed')} into {target}"
    with Reporter(console, runs=len(names) * len(seeds), heading=heading) as progress:
        run_plan(plan, target, progress, progress.notice, callbacks=trackers, ray=arguments.ray)
    report = write_report([target / name for name in plan], target)
    print_report(console, report)
    return console.print(f"{time.monotonic() - began:.0f} s", style="dim")


def track(arguments: argparse.Namespace, console: Console) -> None:
    if not arguments.track:
        raise UsageError("name a tracker, as in 'mimicfl track send runs/demo --track tensorboard:logs'")
    for spec in arguments.track:
        tracker = make_tracker(spec)
        runs, rounds = map(sum, zip(*(send(run, tracker) for run in arguments.runs), strict=True))
        already = "" if rounds else f"; {spec} already has all of them"
        console.print(f"{counted(rounds, 'new round')} of {counted(runs, 'run')} sent to {spec}{already}", soft_wrap=True)


def print_overview(console: Console, groups: Sequence[Group]) -> bool:
    """Print one table of all settings if there are several; returns whether there are."""
    found = overview(groups)
    for view in overview_tables(found, console.width) if found else []:
        console.print()
        console.print(view)
    return found is not None


def print_report(console: Console, report: Report, explain: bool = True) -> None:
    """Print tables, the verdict and where the page is; `explain` adds the rule by which the verdict is made."""
    print_overview(console, report.groups)
    console.print()
    console.print(table(report.groups))
    console.print()
    console.print(verdict(report.groups, finished=not report.unfinished), soft_wrap=True)
    if explain and len(report.groups) > 1:
        console.print(RULE, style="dim")
    if rates := best_rates(report.groups):
        console.print()
        console.print(rates_table(rates, rate_setting(report.groups)))
        console.print()
    if report.unfinished:
        console.print(report.unfinished, style="yellow", soft_wrap=True)
    console.print(f"report   {report.page}", soft_wrap=True)
    console.print(f"figures  {', '.join(p.name for p in report.figures)}, in the same folder", soft_wrap=True)


def default_folder(e: Experiment) -> Path:
    """`runs/mimic-digits-s3-1f0c2a`"""
    words = [parse(e.algorithm)[0], parse(e.dataset)[0], *([f"s{e.seed}"] if e.seed else []), e.id[:6]]
    return Path("runs") / "-".join(words)


def _compare_name(e: Experiment, names: list[str], seeds: list[int]) -> str:
    """`compare-digits-1f0c2a`"""
    digest = hashlib.sha256(json.dumps([e.id, names, seeds]).encode()).hexdigest()
    return f"compare-{parse(e.dataset)[0]}-{digest[:6]}"


def _announcement(e: Experiment, out: Path) -> str:
    length = " / ".join(f"{value} {word}" for word, value in (("rounds", e.rounds), ("uploads", e.uploads)) if value)
    parts = [f"{e.algorithm} on {e.dataset}", f"{e.num_clients} clients", e.availability, length, f"seed {e.seed}"]
    return ", ".join(filter(None, parts)) + f" -> {out}"  # an explicit schedule needs no length


def _finish(console: Console, history: History, out: Path) -> None:
    last = history.rows[-1]
    result = shown_primary({key: history.last(key) for key in last}, history.config) or "not evaluated"
    up, down = (f"{counted(last[f'vectors_{way}'], 'vector')} ({last[f'bytes_{way}'] / 1e6:.3g} MB) {way}" for way in ("up", "down"))
    length = f"{counted(last['round'] + 1, 'round')}, {counted(last['uploads'], 'upload')}"
    console.print(f"{result} after {length}; {up}, {down}", soft_wrap=True)
    console.print(f"report: mimicfl report {out}", soft_wrap=True)
