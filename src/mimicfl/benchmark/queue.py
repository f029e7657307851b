"""The runs that a part still needs, handed out in batches; what has been recorded decides what is needed next."""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..algorithms import make, trait
from ..experiments.execute import Plan
from ..settings import Experiment
from .measure import Result
from .progress import CellProgress, progress_of
from .records import add_to_cell, read_cell
from .suite import Cell, Part

Batch = list[tuple[Cell, Experiment]]
Say = Callable[[str], None]


def plan_of(batch: Batch, settings: dict[str, Any]) -> Plan:
    """The experiments by name, with settings such as the device that are not part of the benchmark."""
    choose = "engine" not in settings and str(settings.get("device")).startswith("cuda")
    return {e.name: dataclasses.replace(e, **settings | ({"engine": gpu_engine(cell)} if choose else {})) for cell, e in batch}


def gpu_engine(cell: Cell) -> str:
    """The engine for a cell's runs on a GPU; with both, the result of a run does not depend on the runs that train with it."""
    small = str(cell.part.settings["model"]).partition(":")[0] in ("lenet", "mlp")
    return "native" if small else "batched:160:compiled"


class Queue:
    """Hands out runs to one or more workers and writes their results. Safe to use from several threads.

    `largest`: runs that train together; `smallest`: fewer are handed out only if there are no more.
    """

    def __init__(self, part: Part, records: Path, cells: Sequence[Cell], plan_hash: str, largest: int, smallest: int, workers: int) -> None:
        self.part, self.records, self.cells, self.plan_hash = part, records, cells, plan_hash
        self.largest, self.smallest, self.workers = largest, smallest, workers
        self.known = {cell.name: read_cell(records, cell) for cell in cells}
        self.taken: set[str] = set()
        self.stopped = False
        self.changed = threading.Condition()

    @property
    def left(self) -> int:
        """How many runs are not recorded, as far as known: tuning may need more."""
        return sum(state.total - state.done for state in self._states().values())

    @property
    def complete(self) -> bool:
        return not self.left

    def announce(self, batch: Batch, say: Say | None, worker: str = "") -> None:
        """Say how far the part is, and which runs are next."""
        if say:
            with self.changed:
                states = self._states().values()
                done, total = (sum(getattr(state, key) for state in states) for key in ("done", "total"))
                next_runs = f"next{worker}: {len(batch)} runs of {batch[0][0].name} and others"
                say(f"{self.part.name}: {done} of at least {total} runs recorded; {next_runs}")

    def take(self, most: int | None = None) -> Batch:
        """The next runs, at most `most`; waits for the results of others if they may bring new ones. Empty: there is nothing to do."""
        with self.changed:
            while not self.stopped:
                if batch := self._next()[:most]:
                    self.taken |= {e.id for _, e in batch}
                    return batch
                if not self.taken:
                    break
                self.changed.wait()
            return []

    def give_back(self, batch: Batch, results: dict[str, Result]) -> None:
        """Record these results, by name; the other runs of the batch are needed again."""
        with self.changed:
            try:
                for name in dict.fromkeys(cell.name for cell, _ in batch):
                    own = {e.id: results[e.name] for cell, e in batch if cell.name == name and e.name in results}
                    if own:
                        made = {key: {"id": key, "plan": self.plan_hash, **result} for key, result in own.items()}
                        self.known[name] = add_to_cell(self.records, next(cell for cell, _ in batch if cell.name == name), made)
            finally:
                self.taken -= {e.id for _, e in batch}
                self.changed.notify_all()

    def stop(self) -> None:
        """Hand out nothing more."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def _states(self) -> dict[str, CellProgress]:
        return {cell.name: progress_of(cell, self.known[cell.name]) for cell in self.cells}

    def _next(self) -> Batch:
        """Runs that can train together, cell by cell, those of cells in tuning first; enough for every worker to get some."""
        states = self._states()
        waiting = sorted(self.cells, key=lambda cell: states[cell.name].stage != "tuning")
        free = [(cell, e) for cell in waiting for e in states[cell.name].missing if e.id not in self.taken]
        alike = [(cell, e) for cell, e in free if self._kind(cell, e) == self._kind(*free[0])]
        return alike[: min(self.largest, max(self.smallest, -(-len(alike) // self.workers)))]

    @staticmethod
    def _kind(cell: Cell, e: Experiment) -> tuple[float, bool]:
        """Runs with other data, or whose clients send something other than updates, cannot train in one program."""
        return e.validation, _sends_updates(cell.grid.algorithm)


@functools.cache
def _sends_updates(algorithm: str) -> bool:
    return bool(trait(make(algorithm), "sends_g"))
