"""`report --live`: rewrite the page while runs are in progress."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..errors import UsageError, number
from ..metrics.find import config_files
from ..metrics.listing import listed
from ..report.report import Report, write_report

EVERY = 5.0  # seconds


def follow(console: Console, paths: Sequence[str], out: str | None, every: float) -> Report:
    """Write the page every few seconds until all runs at or below the paths are finished; returns the last report, with its figures."""
    number("--every", every, low=0.5)
    for path in paths:
        if not Path(path).exists():
            raise UsageError(f"{path} does not exist; name the folder of the runs, even if it is still empty")
    said, seen = "", None
    while True:
        runs = [listed(folder) for path in paths for folder in config_files(Path(path))]
        if runs and all(run.status == "finished" for run in runs):
            return write_report(paths, out)
        changed = [(run.path, run.status, run.changed) for run in runs]
        if any(run.rounds for run in runs) and changed != seen:
            page = write_report(paths, out, live=every).page
            word = f"{sum(run.status == 'finished' for run in runs)} of {len(runs)} runs finished; page {page}, Ctrl-C to stop"
        else:
            word = said if any(run.rounds for run in runs) else "waiting for the first round"
        if word != said:
            console.print(word, style="dim", soft_wrap=True)
        said, seen = word, changed
        time.sleep(every)
