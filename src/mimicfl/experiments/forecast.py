"""What a command would do: which runs are finished, how long the others would train, and how much memory they need."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..algorithms.client_memory import ClientMemory
from ..data.samples import tensors
from ..engines.cost import Workload
from ..metrics.store import RunFolder, as_folder
from ..settings import Experiment
from ..simulation.run import Run
from .execute import Built, groups, split_finished


@dataclass(frozen=True)
class PlannedRun:
    """A run that a command would train, or has trained already."""

    name: str
    experiment: Experiment
    rounds: int
    done: int  # rounds that are finished
    seconds: float  # of plain training still to do, estimated

    @property
    def finished(self) -> bool:
        return self.done >= self.rounds


@dataclass(frozen=True)
class Forecast:
    runs: list[PlannedRun]
    groups: int  # of runs that train together
    memory: int  # bytes for data, models and per-client state of the largest group; local training needs more

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.runs)


def forecast(built: Built, out: str | Path | None) -> Forecast:
    """Inspect the folders and estimate the work; nothing is trained or written."""
    folder = None if out is None else as_folder(out)
    _, waiting = split_finished(built, folder)
    parts = groups(waiting)
    seconds: dict[str, float] = {}
    for names in parts:
        work = Workload([waiting[name][1] for name in names])
        for name in names:
            done = _rounds_in(folder, name)
            cumulated = work.rounds[waiting[name][1]]
            seconds[name] = float(cumulated[-1] - cumulated[min(done, len(cumulated) - 1)])
    runs = [
        PlannedRun(name, e, run.rounds, run.rounds if name not in waiting else _rounds_in(folder, name), seconds.get(name, 0.0))
        for name, (e, run) in built.items()
    ]
    most = max((_memory([waiting[name][1] for name in names]) for names in parts), default=0)
    return Forecast(runs, len(parts), most)


def _rounds_in(folder: Path | None, name: str) -> int:
    """Rounds that a run's checkpoint includes."""
    if folder is None or not (folder / name / "config.toml").exists():
        return 0
    saved = RunFolder(folder / name).load("checkpoint")
    return int(saved[1].get("round", 0)) if saved else 0


def _memory(runs: list[Run]) -> int:
    """Runs that share their data hold it once."""
    held = {id(run.problem.data): [*tensors(run.problem.clients.x), *tensors(run.problem.clients.y)] for run in runs}
    data = {key: sum(t.nbytes for t in each) for key, each in held.items()}
    return sum(data.values()) + sum(_state(run) for run in runs)


def _state(run: Run) -> int:
    """The model, its running mean if there is one, and one vector per client that participates for each memory of the algorithm."""
    w = run.server.w
    seen = int(np.count_nonzero(run.active.any(axis=0)))
    held = vars(run.server.state).values()
    memories, means = sum(isinstance(value, ClientMemory) for value in held), int(run.server.running_mean is not None)
    return w.nbytes * (2 + means + memories * seen) + sum(getattr(value, "nbytes", 0) for value in held if value is not w)
