"""`--dry-run`: print what a command would train, without training."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..experiments.forecast import Forecast, PlannedRun
from ..text import counted

MOST_LISTED = 40


def print_forecast(console: Console, found: Forecast, out: Path) -> None:
    """One line per run, then the totals."""
    view = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("run", "algorithm", "seed", "rounds", "status"):
        view.add_column(head, justify="right" if head in ("seed", "rounds") else "left", overflow="fold")
    for run in found.runs[:MOST_LISTED]:
        e = run.experiment
        view.add_row(str(out / run.name), e.algorithm, str(e.seed), str(run.rounds), _status(run))
    console.print(view)
    if len(found.runs) > MOST_LISTED:
        console.print(f"... and {len(found.runs) - MOST_LISTED} more runs", style="dim")
    waiting = [run for run in found.runs if not run.finished]
    if not waiting:
        return console.print(f"all {counted(len(found.runs), 'run')} are finished: nothing to do", soft_wrap=True)
    rounds = sum(run.rounds - run.done for run in waiting)
    together = "" if len(waiting) == 1 else ", all together" if found.groups == 1 else f", in {found.groups} groups that train together"
    console.print(f"{len(waiting)} of {counted(len(found.runs), 'run')} to train, {counted(rounds, 'round')}{together}", soft_wrap=True)
    console.print(f"time     about {duration(found.seconds)} with engine plain on one core, less with a faster one", soft_wrap=True)
    return console.print(f"memory   about {size(found.memory)} for data, models and client state, plus local training", soft_wrap=True)


def _status(run: PlannedRun) -> str:
    return "finished" if run.finished else f"resumes after round {run.done}" if run.done else "new"


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def size(count: int) -> str:
    """`3 MB`, `1.2 GB`."""
    return f"{max(count / 1e6, 0.1):.3g} MB" if count < 1e9 else f"{count / 1e9:.3g} GB"
