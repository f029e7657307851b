"""`reproduce`: the paper's experiments, from declaration to record."""

import argparse
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..errors import Diverged, UsageError, number
from ..experiments.execute import Plan
from ..experiments.names import seed_list
from ..metrics.find import is_finished
from ..paper.records import Records, read_all
from ..paper.reproduce import Cell, as_recorded, cells, collect, compare_with_records, missing, plan_of, reproduce, seconds
from ..paper.studies import STUDIES, find
from ..paper.study import Study
from ..report.paper import cell_text, published_text, write_paper_report
from ..report.summary import title
from ..text import counted
from .options import given
from .progress import Reporter

RECORDS, RUNS = Path("records/paper"), Path("runs/paper")


def run(arguments: argparse.Namespace, console: Console) -> None:
    records = Path(arguments.records or RECORDS)
    seeds = seed_list(arguments.seeds)
    if arguments.minutes is not None:
        number("--minutes", arguments.minutes, low=0)
    if arguments.list:
        return _list(console)
    if not arguments.names and not arguments.status:
        raise UsageError("name an experiment, as in 'mimicfl reproduce table-4-fmnist', or 'all'; see mimicfl reproduce --list")
    wanted = list(cells(find(arguments.names), arguments.columns or (), arguments.algorithms or ()))
    if not records.exists() and (arguments.status or (arguments.again and arguments.records)):
        where = f"{records} does not exist" if arguments.records else f"there is no records folder here ({records})"
        raise UsageError(f"{where}; name it with --records DIR, or run this in the repository")
    if arguments.status:
        return _status(console, wanted, read_all(records), seeds)
    return _run(arguments, console, wanted, seeds, records)


def _run(arguments: argparse.Namespace, console: Console, wanted: list[Cell], seeds: list[int], records: Path) -> None:
    scale = 1.0 if arguments.scale is None else arguments.scale
    plan = plan_of(wanted, seeds, scale, given(arguments))
    if arguments.again:
        if scale != 1.0:
            raise UsageError("--again repeats recorded runs, and scaled runs are not recorded: remove --scale")
        _again(arguments, console, plan, records)
    elif scale == 1.0:
        _missing(arguments, console, wanted, seeds, plan, records)
    else:
        _quick_look(arguments, console, wanted, seeds, plan, scale)


def _quick_look(arguments: argparse.Namespace, console: Console, wanted: list[Cell], seeds: list[int], plan: Plan, scale: float) -> None:
    out = Path(arguments.out or f"runs/paper-x{scale:g}")
    with Reporter(console, list(plan.values())) as progress:
        progress.notice(f"{len(plan)} runs at scale {scale:g} into {out}: a quick look, not the paper's setting, and not recorded")
        left, failures = reproduce(plan, out, None, arguments.minutes, progress, progress.notice)
    with tempfile.TemporaryDirectory() as folder:
        collect(plan, out, Path(folder))
        found = read_all(Path(folder))
    _print_all(console, wanted, found, seeds, scale)
    _end(console, left, failures)


def report(arguments: argparse.Namespace, console: Console) -> None:
    """Write the page and, for the package's own documentation, the document."""
    if arguments.runs:
        raise UsageError("--paper uses records, not runs: remove the run folders")
    folder = Path(arguments.records or RECORDS)
    if not folder.exists():
        raise UsageError(f"{folder} has no records yet: run an experiment first, see mimicfl reproduce --list")
    records = read_all(folder)
    out = Path(arguments.out) if arguments.out else None
    page = (out or Path("runs/paper")) / "report.html"
    document = (out or Path("docs")) / "reproduce.md"
    write_paper_report(records, seed_list(None), page, document, document.parent / "pictures")
    console.print(f"page     {page}\ndocument {document}", soft_wrap=True)


def _missing(arguments: argparse.Namespace, console: Console, wanted: list[Cell], seeds: list[int], plan: Plan, records: Path) -> None:
    out = Path(arguments.out or RUNS)
    todo = missing(plan, read_all(records))
    with Reporter(console, list(todo.values())) as progress:
        progress.notice(f"{len(plan)} runs, {len(plan) - len(todo)} of them already in {records}; {len(todo)} to train, in {out}")
        left, failures = reproduce(todo, out, records, arguments.minutes, progress, progress.notice)
    _print_all(console, wanted, read_all(records), seeds)
    console.print(f"records  {records}; the page of all of them: mimicfl report --paper", soft_wrap=True)
    _end(console, left, failures)


def _end(console: Console, left: int, failures: list[str]) -> None:
    if failures:
        raise Diverged("; ".join(failures))
    if left:
        console.print(f"{left} {'run is' if left == 1 else 'runs are'} left: run the same command again")


def _again(arguments: argparse.Namespace, console: Console, plan: Plan, records: Path) -> None:
    """Repeat recorded runs in another folder, and compare."""
    known, out = read_all(records), Path(arguments.out or "runs/paper-again")
    plan = {name: e for name, e in plan.items() if e.id in known} if "engine" in arguments else as_recorded(plan, known)
    if not plan:
        raise UsageError(f"none of these runs is in {records} yet: nothing to compare with")
    if out.resolve() == RUNS.resolve():
        raise UsageError(f"{out} holds the recorded runs: choose another --out to repeat them")
    before = [name for name in plan if is_finished(out / name)]
    with Reporter(console, list(plan.values())) as progress:
        progress.notice(f"{len(plan)} recorded runs are repeated in {out}")
        left, failures = reproduce(plan, out, None, arguments.minutes, progress, progress.notice)
    pairs = compare_with_records(plan, out, known)
    for run in pairs:
        then, now = run.ends
        said = "identical in every round" if run.same else f"{100 * (now - then):+.2f} points"
        console.print(f"{run.name}: recorded {100 * then:.2f} %, now {100 * now:.2f} %: {said}", soft_wrap=True)
    console.print(f"{sum(run.same for run in pairs)} of {len(pairs)} runs are identical in every round")
    for reason in dict.fromkeys(run.otherwise for run in pairs if not run.same):
        console.print(
            f"reason for the difference: {reason or 'unknown; the settings and the hardware are the same, so please report it'}",
            soft_wrap=True,
        )
    if before:
        console.print(
            f"{len(before)} of them were already in {out} and were not repeated; choose another --out to repeat them", soft_wrap=True
        )
    _end(console, left, failures)


def _list(console: Console) -> None:
    for study in STUDIES.values():
        console.print(f"{study.name:20} {study.title}: {study.about}", soft_wrap=True)
        console.print(
            f"{'':20} {study.head or 'column'}: {', '.join(study.columns)}; {', '.join(study.algorithms)}", style="dim", soft_wrap=True
        )


def _status(console: Console, wanted: list[Cell], records: Records, seeds: list[int]) -> None:
    view = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("experiment", "column", "recorded", "missing"):
        view.add_column(head)
    view.add_column("minutes", justify="right")
    if not wanted or not seeds:
        raise UsageError("nothing to run: no column, algorithm or seed is selected")
    there = whole = 0
    cost: dict[str, float] = {}
    for study, column in dict.fromkeys((cell.study.name, cell.column) for cell in wanted):
        own = [cell for cell in wanted if (cell.study.name, cell.column) == (study, column)]
        lacking = {cell.algorithm: [e for e in cell.runs(seeds) if e.id not in records] for cell in own}
        cost |= (here := {e.id: seconds(e) for runs in lacking.values() for e in runs})
        found, all_of_it = len(seeds) * len(own) - len(here), len(seeds) * len(own)
        there, whole = there + found, whole + all_of_it
        names = ", ".join(f"{title(a)} {len(runs)}" for a, runs in lacking.items() if runs)
        view.add_row(study, column, f"{found} of {all_of_it}", names or "–", f"{max(1, round(sum(here.values()) / 60))}" if here else "–")
    console.print(view)
    minutes = max(1, round(sum(cost.values()) / 60))
    left = f"; the missing ones take about {counted(minutes, 'minute')} on an H200" if cost else ""
    console.print(f"{there} of {whole} runs are recorded (a run that several experiments use is counted in each){left}", soft_wrap=True)


def _print_all(console: Console, wanted: list[Cell], records: Records, seeds: list[int], scale: float = 1.0) -> None:
    for name in dict.fromkeys(cell.study.name for cell in wanted):
        _print(console, STUDIES[name], [cell for cell in wanted if cell.study.name == name], records, seeds, scale)


def _print(console: Console, study: Study, wanted: list[Cell], records: Records, seeds: list[int], scale: float) -> None:
    console.print(
        f"\n{study.title}" + (f"  (scale {scale:g}: a quick look, not the paper's setting)" if scale != 1.0 else ""), style="bold"
    )
    view = Table(box=None, header_style="bold", pad_edge=False)
    view.add_column("algorithm")
    columns = list(dict.fromkeys(cell.column for cell in wanted))
    for column in columns:
        view.add_column(f"{study.head} {column}".strip(), justify="right")
        view.add_column("published", justify="right", style="dim")
    for algorithm in dict.fromkeys(cell.algorithm for cell in wanted):
        texts = []
        for column in columns:
            texts += [cell_text(Cell(study, column, algorithm), records, seeds, scale), published_text(study, algorithm, column)]
        view.add_row(title(algorithm), *texts)
    console.print(view)
