"""Run the missing experiments of a part in batches, and record each batch. A killed command resumes the runs of its last batches."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..callbacks.interface import callback_set
from ..callbacks.tracker import unsent
from ..errors import UsageError, integer, shown
from ..experiments.execute import Progress
from ..problem import find_device
from .batch import Callbacks, train_batch
from .processes import MOST, Workers
from .queue import Batch, Queue, Say, plan_of
from .records import register
from .suite import Cell, Part

BATCH, GPU_BATCH = 60, 240  # runs that train together; only the clients of many small runs fill a GPU
LEAST, GPU_LEAST = 4, 40  # fewer are not worth a process's time to start them


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
    processes: int = 1,
) -> bool:
    """Run what is missing of these cells until they are complete (True) or the time is up (False).

    `callbacks` must only observe, as trackers do: a result of the benchmark does not depend on them. `processes`: how many train batches at
    the same time, on the same device.
    """
    watching = _watching(callbacks)
    if integer("processes", processes, high=MOST) > 1 and watching:
        raise UsageError("trackers follow the runs of one process only: remove --track, or give --processes 1")
    plan_hash = register(records, part, amend)
    until = None if minutes is None else time.monotonic() + 60 * minutes
    gpu = find_device(settings.get("device", part.device)).type == "cuda"
    sizes = (GPU_BATCH, GPU_LEAST) if gpu else (BATCH, LEAST)
    queue = Queue(part, records, cells, plan_hash, *sizes, processes)
    if processes > 1 and not queue.complete:
        with Workers(min(processes, queue.left), gpu) as workers:
            return workers.run(queue, part.target, out, settings, until, say, lambda batch: _clean(queue, out, batch))
    while batch := queue.take():
        if until is not None and time.monotonic() >= until:
            return False
        queue.announce(batch, say)
        queue.give_back(batch, train_batch(plan_of(batch, settings), part.target, out, until, progress, watching))
        _clean(queue, out, batch)
    return True


def _clean(queue: Queue, out: Path, batch: Batch) -> None:
    """Remove the folders of recorded runs: thousands of small runs would fill a disk. Those that a tracker has not received are kept."""
    for cell, e in batch:
        if e.id in queue.known[cell.name] and not unsent(out / e.name):
            shutil.rmtree(out / e.name, ignore_errors=True)


def _watching(callbacks: Callbacks) -> Callbacks:
    given = callback_set(None, callbacks)
    if given.of_result:
        raise UsageError(
            f"callbacks of the benchmark must only observe, as trackers do, got {shown(given.of_result[0])}, which can change results"
        )
    return given.given
