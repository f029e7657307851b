"""`benchmark` and `recommend`: run the reference evaluation, list what is recorded, and recommend an algorithm."""

import argparse
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table as View

from ..benchmark.recommend import LIMITS, Finding, advise, shipped, shown_rate
from ..benchmark.run import run_part
from ..benchmark.suite import PARTS, Cell, Part, find_part
from ..callbacks import make as make_tracker
from ..errors import UsageError, nearest, number
from ..problem import find_device
from ..report.benchmark import findings, overview, write_benchmark_report
from ..settings import Experiment
from .options import given
from .progress import Reporter

RECORDS, RUNS = Path("records/benchmark"), Path("runs/benchmark")
FAR, OTHER_RATE = 1.0, 2.5  # a distance and a factor between the rates beyond which the nearest pattern says little


def benchmark(arguments: argparse.Namespace, console: Console) -> None:
    {"list": _list, "run": _run, "status": _status, "page": _page}[arguments.action](arguments, console)


def _parts(arguments: argparse.Namespace) -> list[Part]:
    return [find_part(name) for name in arguments.parts] or list(PARTS.values())


def _cells(arguments: argparse.Namespace, part: Part) -> list[Cell]:
    known = {"pattern": [p.name for p in part.patterns], "algorithm": [g.algorithm for g in part.grids]}
    wanted = {"pattern": arguments.patterns or [], "algorithm": arguments.algorithms or []}
    for what, names in wanted.items():
        for name in names:
            if name not in known[what]:
                raise UsageError(f"{part.name} has no {what} {name!r}; {nearest(name, known[what])}")
    return [
        cell
        for cell in part.cells()
        if (not wanted["pattern"] or cell.pattern.name in wanted["pattern"])
        and (not wanted["algorithm"] or cell.grid.algorithm in wanted["algorithm"])
    ]


def _table(*names: str) -> View:
    """A table whose columns after the first are numbers."""
    view = View(box=None, header_style="bold", pad_edge=False)
    for i, name in enumerate(names):
        view.add_column(name, justify="right" if i else "left", overflow="fold", no_wrap=not i)
    return view


def _list(arguments: argparse.Namespace, console: Console) -> None:
    """All parts in one table; of named parts the patterns and what is tuned."""
    if not arguments.parts:
        view = _table("part", "patterns", "algorithms", "seeds", "runs", "")
        view.columns[-1].justify = "left"
        for part in PARTS.values():
            view.add_row(part.name, *map(str, (len(part.patterns), len(part.grids), part.seeds, f"{_least_runs(part):,}", part.title)))
        console.print(view)
        console.print("the patterns, algorithms and what is tuned: mimicfl benchmark list PART", soft_wrap=True)
    for part in map(find_part, arguments.parts):
        console.print(
            f"{part.name}: {part.title}, {part.rounds} rounds, {part.seeds} seeds, at least {_least_runs(part):,} runs", style="bold"
        )
        for pattern in part.patterns:
            console.print(f"  {pattern.name:14} {pattern.about}", soft_wrap=True)
            console.print(f"  {'':14} {pattern.availability}", style="dim", soft_wrap=True)
        for grid in part.grids:
            axes = "; ".join(f"{axis.name} {', '.join(f'{v:g}' for v in axis.values)}" for axis in grid.axes)
            console.print(f"  {grid.algorithm:18} {axes}", style="dim", soft_wrap=True)


def _least_runs(part: Part) -> int:
    return len(part.cells()) * (36 + part.seeds)


def _run(arguments: argparse.Namespace, console: Console) -> None:
    if arguments.minutes is not None:
        number("--minutes", arguments.minutes, low=0)
    if len(arguments.parts) != 1:
        raise UsageError("name the part to run, as in 'mimicfl benchmark run digits'; see mimicfl benchmark list")
    part = find_part(arguments.parts[0])
    trackers = [make_tracker(spec) for spec in arguments.track]
    settings = given(arguments)
    settings["device"] = str(find_device(str(settings.get("device", "cpu"))))
    records, out = Path(arguments.records or RECORDS), Path(arguments.out or RUNS)
    cells = _cells(arguments, part)
    with Reporter(console, []) as progress:
        how = {"callbacks": trackers, "processes": arguments.processes}
        done = run_part(part, records, out, cells, settings, arguments.minutes, arguments.amend, progress.notice, **how)
    console.print("complete; the page: mimicfl benchmark page" if done else "not complete yet: run the same command again", soft_wrap=True)


def _status(arguments: argparse.Namespace, console: Console) -> None:
    """How many runs of each part are recorded; of named parts, how many of each cell, and deviations from the plan."""
    records = Path(arguments.records or RECORDS)
    if not arguments.parts:
        view = _table("part", "recorded", "of at least", "plan")
        for part in PARTS.values():
            found = overview(part, records)
            view.add_row(part.name, *(f"{number:,}" for number in found.done), found.plan)
        console.print(view)
        console.print("every cell, and deviations from the plan: mimicfl benchmark status PART", soft_wrap=True)
    for part in map(find_part, arguments.parts):
        found = overview(part, records)
        done, total = found.done
        console.print(f"{part.name}: {done:,} of at least {total:,} runs recorded; plan {found.plan}", style="bold", soft_wrap=True)
        view = _table("algorithm", *(table.pattern.name for table in found.tables))
        for grid in part.grids:
            states = [table.entries[grid.algorithm].state for table in found.tables]
            view.add_row(grid.algorithm, *("done" if s.stage == "complete" else f"{s.done}/{s.total}" for s in states))
        console.print(view)
        for line in found.deviations:
            console.print(f"  {line}", soft_wrap=True)


def _page(arguments: argparse.Namespace, console: Console) -> None:
    records = Path(arguments.records or RECORDS)
    if not records.exists():
        raise UsageError(f"there is no folder {records}; run a part first, or name the folder with --records DIR")
    out = Path(arguments.out) if arguments.out else None
    page, document = (out or RUNS) / "report.html", (out or Path("docs")) / "benchmark.md"
    write_benchmark_report(records, page, document, document.parent / "pictures")
    console.print(f"page     {page}\ndocument {document}", soft_wrap=True)


def _evidence(finding: Finding, part: Part) -> str:
    """The lead of the first recommended algorithm, and the evidence for it."""
    if finding.by == "–":
        return f"{finding.sure} ({part.title})"
    first = re.split(", | or ", finding.use)[0]
    return f"{first} {finding.by}, in points of accuracy ({part.title}); {finding.sure}"


def recommend(arguments: argparse.Namespace, console: Console) -> None:
    """Print the benchmarked pattern that is most similar to the given availability, and the best algorithm under it."""
    part, records = find_part(arguments.part), Path(arguments.records or RECORDS)
    settings = {key: value for key, value in given(arguments).items() if value is not None}
    known = findings(part, records) if arguments.records or records.exists() else shipped(part)
    if not known:
        own = settings.get("availability", "SPEC")
        raise UsageError(
            f"a recommendation needs results of the benchmark, and {records} holds none of the part {part.name!r}; run it, "
            f"at least {_least_runs(part)} runs (mimicfl benchmark run {part.name}), or compare the algorithms under your own availability "
            f"(mimicfl compare --availability {own})"
        )
    experiment = Experiment(**{key: part.settings[key] for key in ("dataset", "num_clients", "partition")} | settings).resolved()
    best, *others = advise(experiment, known)
    console.print(f"use {best.finding.use}", style="bold", soft_wrap=True)
    console.print(f"your schedule: {best.own.sentence()}", soft_wrap=True)
    console.print(
        f"nearest of {len(known)} recorded patterns: {best.finding.pattern!r} ({best.finding.about}), at a distance of {best.distance:.1f} "
        f"(0: the same structure, {FAR:g}: far)",
        soft_wrap=True,
    )
    console.print(f"evidence: {_evidence(best.finding, part)}", soft_wrap=True)
    if part.name in LIMITS:
        console.print(f"limits: {LIMITS[part.name]}", soft_wrap=True)
    if best.differs:
        console.print(f"differences: {', '.join(best.differs)}", soft_wrap=True)
    apart = ["in structure"] * (best.distance > FAR or bool(best.unlike))
    if best.factor > OTHER_RATE:
        recorded = shown_rate(best.finding.profile)
        least = "" if min(each.factor for each in (best, *others)) <= OTHER_RATE else "; no recorded rate is close"
        apart.append(f"in rate (clients are available in {recorded} of the rounds there, {shown_rate(best.own)} in yours{least})")
    if apart:
        what = f"the nearest pattern is not close {' and '.join(apart)}"
        console.print(f"{what}: compare the algorithms on your own schedule with mimicfl compare", soft_wrap=True)
    for other in others[:2]:
        away = f"next nearest: {other.finding.pattern}, at {other.distance:.1f}" + ", of another structure" * (other.unlike > best.unlike)
        console.print(f"{away} (use {other.finding.use})", style="dim", soft_wrap=True)
