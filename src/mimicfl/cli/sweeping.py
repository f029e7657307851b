"""`sweep`: train a grid of settings. A finished sweep that is repeated prints its tables again without importing PyTorch."""

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from .finished import Memo
from .options import given, replaced_by


def sweep(arguments: argparse.Namespace, console: Console) -> None:
    target = arguments.folder = Path(arguments.out or Path("runs") / Path(arguments.file).stem)
    own = _replacements(arguments)
    options = (arguments.track, arguments.ray)
    memo = Memo.of(target, arguments.file, own, console, options)
    if memo.certain and not arguments.dry_run and memo.replay(console):
        return
    with memo.recording() as opened:
        finished = _train(arguments, console, target, dict(own), memo)
    if finished is not None and memo == Memo.of(target, arguments.file, own, console, options):  # nothing was edited meanwhile
        memo.keep(*finished, opened)


def _replacements(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that options replace, `--algorithms` and `--seeds` as lists."""
    own = given(arguments)
    for key, values in (("algorithm", arguments.algorithms), ("seed", arguments.seeds)):
        if values is not None:
            own[key] = values
    return own


def _train(
    arguments: argparse.Namespace, console: Console, target: Path, own: dict[str, Any], memo: Memo
) -> tuple[str, list[Path], list[Path]] | None:
    """Train what is not finished and write the pages; returns what was printed, the runs and the pages.

    None if nothing is to be kept: after a dry run, or if the runs are those of the memo, whose pages are still there.
    """
    from ..callbacks import make
    from ..errors import UsageError
    from ..experiments.execute import build_all, run_plan
    from ..experiments.forecast import forecast
    from ..experiments.grid import cells, read_sweep
    from ..experiments.names import algorithm_list, seed_list
    from ..plugins import load_plugins
    from .dry_run import print_forecast
    from .progress import Reporter

    began = time.monotonic()
    trackers = [make(spec) for spec in arguments.track]
    if trackers and arguments.ray:
        raise UsageError("--track is for runs on this machine; after a sweep with --ray, use mimicfl track send")
    load_plugins(own.get("plugins", []))
    own |= {"algorithm": algorithm_list(own["algorithm"])} if arguments.algorithms else {}
    own |= {"seed": seed_list(own["seed"])} if arguments.seeds is not None else {}
    plan = read_sweep(arguments.file, own, replaced_by(own))
    if arguments.dry_run:
        print_forecast(console, forecast(build_all(plan), target), target)
        return None
    with Reporter(console, list(plan.values()), heading=f"{len(plan)} runs into {target}") as progress:
        if arguments.ray:
            from ..experiments.cluster import run_plan_on

            run_plan_on(arguments.ray, plan, target, progress.notice)
        else:
            run_plan(plan, target, progress, progress.notice, callbacks=trackers)
    runs = [target / name for name in plan]
    if not memo.certain and memo.replay(console, runs):
        return None
    from ..report.rates import best_rates, rate_setting
    from ..report.report import write_report
    from ..report.tables import rates_table
    from ..report.verdict import RULE, tally
    from .train import print_overview, print_report

    console.record = True
    reports = {cell: write_report([target / name for name in names], target / cell) for cell, names in cells(plan).items()}
    pages = [report.page for report in reports.values()]
    for cell, report in reports.items():
        if cell:
            console.print(f"\n{cell}", style="bold", soft_wrap=True)
        print_report(console, report, explain=len(reports) == 1)
    if len(reports) > 1:
        whole = write_report(runs, target)
        pages.append(whole.page)
        console.print("\nall settings", style="bold")
        print_overview(console, whole.groups)
        console.print()
        if counts := tally(whole.groups):
            console.print(counts, soft_wrap=True)
        console.print(RULE, style="dim")
        if rates := best_rates(whole.groups):
            console.print()
            console.print(rates_table(rates, rate_setting(whole.groups)))
            console.print()
        console.print(f"all settings on one page: {whole.page}", soft_wrap=True)
    shown, console.record = console.export_text(styles=True), False
    console.print(f"{time.monotonic() - began:.0f} s", style="dim")
    return shown, runs, pages
