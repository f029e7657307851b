"""Run the missing experiments of a part in batches, and record each batch. SIGKILL loses at most the batch in progress."""

import dataclasses
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..callbacks.interface import Callback, EachRound, callback_set
from ..callbacks.tracker import unsent
from ..errors import Diverged, Paused, UsageError, shown
from ..experiments.execute import Plan, Progress, carry_out
from ..files import scratch
from ..metrics.environment import environment
from ..metrics.history import read
from ..metrics.store import RunFolder
from ..problem import find_device
from ..settings import Experiment
from .measure import Result, measure, score_only
from .progress import CellProgress, progress_of
from .records import Results, read_cell, register, write_cell
from .suite import Cell, Part

BATCH, GPU_BATCH = 60, 240  # runs that train together; only the clients of many small runs fill a GPU
Say = Callable[[str], None]
Callbacks = Sequence[Callback | EachRound]


def run_part(
    part: Part,
    records: Path,
    out: Path,
    cells: Sequence[Cell],
    settings: dict[str, Any],
    minutes: float | None = None,
    amend: str | None = None,
    say: Say | None = None,
    progress: Progress | None = None,
    callbacks: Callbacks = (),
) -> bool:
    """Run what is missing of these cells until they are complete (True) or the time is up (False).

    `callbacks` must only observe, as trackers do: a result of the benchmark does not depend on them.
    """
    watching = _watching(callbacks)
    plan_hash = register(records, part, amend)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    known = {cell.name: read_cell(records, cell) for cell in cells}
    size = GPU_BATCH if find_device(settings.get("device", part.device)).type == "cuda" else BATCH
    while True:
        states = {cell.name: progress_of(cell, known[cell.name]) for cell in cells}
        batch = next_batch(cells, states, size)
        if not batch:
            return True
        if deadline is not None and time.monotonic() >= deadline:
            return False
        if say:
            done, total = (sum(getattr(state, key) for state in states.values()) for key in ("done", "total"))
            say(f"{part.name}: {done} of at least {total} runs recorded; next: {len(batch)} runs of {batch[0][0].name} and others")
        finished = _train(batch, part, out, settings, deadline, plan_hash, progress, watching)
        for cell in cells:
            if cell.name in finished:
                known[cell.name] |= finished[cell.name]
                write_cell(records, cell, known[cell.name])
        _clean(out, [e.name for cell, e in batch if e.id in known[cell.name]])


def next_batch(cells: Sequence[Cell], states: dict[str, CellProgress], size: int) -> list[tuple[Cell, Experiment]]:
    """The next runs, cell by cell, those in tuning first."""
    waiting = sorted(cells, key=lambda cell: states[cell.name].stage != "tuning")
    return [(cell, e) for cell in waiting for e in states[cell.name].missing][:size]


def _train(
    batch: list[tuple[Cell, Experiment]],
    part: Part,
    out: Path,
    settings: dict[str, Any],
    deadline: float | None,
    plan_hash: str,
    progress: Progress | None,
    callbacks: Callbacks,
) -> dict[str, Results]:
    """Train a batch and return the results of the runs that ended, by cell."""
    plan = {e.name: dataclasses.replace(e, **settings) for _, e in batch}
    failures = _carry_out(plan, out, deadline, progress, callbacks)
    found: dict[str, Results] = {}
    for cell, e in batch:
        if (result := _result(e, part, out, failures.get(e.name))) is not None:
            found.setdefault(cell.name, {})[e.id] = {"id": e.id, "plan": plan_hash, **result}
    return found


def _carry_out(plan: Plan, out: Path, deadline: float | None, progress: Progress | None, callbacks: Callbacks) -> dict[str, str]:
    """Train the runs; return the messages of those that diverged. If any does, the unfinished ones are run one by one to find it."""
    failures: dict[str, str] = {}
    try:
        with scratch():
            carry_out(plan, out, progress, deadline=deadline, callbacks=callbacks)
    except Paused:
        pass
    except Diverged as error:
        if len(plan) == 1:
            return {next(iter(plan)): str(error)}
        for name, e in plan.items():
            if not (out / name / "final.safetensors").exists() and (deadline is None or time.monotonic() < deadline):
                failures |= _carry_out({name: e}, out, deadline, progress, callbacks)
    return failures


def _result(e: Experiment, part: Part, out: Path, failure: str | None) -> Result | None:
    kind = {"stage": "tuning" if e.validation else "final", "seed": e.seed, "algorithm": e.algorithm, "lr": e.lr, "global_lr": e.global_lr}
    if failure is not None:
        return kind | {"environment": environment(), "diverged": failure}
    if not (out / e.name / "final.safetensors").exists():
        return None
    folder = RunFolder(out / e.name)
    final = folder.load("final")
    engine = final[1].get("engine", "") if final else ""
    run = read(folder)
    return (
        kind | {"environment": folder.environment() | {"engine": engine}} | (score_only(run) if e.validation else measure(run, part.target))
    )


def _clean(out: Path, names: Sequence[str]) -> None:
    """Remove the folders of recorded runs: thousands of small runs would fill a disk. Those that a tracker has not received are kept."""
    for name in names:
        if not unsent(out / name):
            shutil.rmtree(out / name, ignore_errors=True)


def _watching(callbacks: Callbacks) -> Callbacks:
    given = callback_set(None, callbacks)
    if given.of_result:
        raise UsageError(
            f"callbacks of the benchmark must only observe, as trackers do, got {shown(given.of_result[0])}, which can change results"
        )
    return given.given
