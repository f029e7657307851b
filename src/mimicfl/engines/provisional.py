"""Plain training for a run that was estimated to be short, with a change of engine if the first tenth shows that the estimate was wrong.

The estimate is checked once, after a round that depends only on the schedule. The check uses the processor time of the training thread,
which a busy machine hardly changes. The decision is saved in a checkpoint before the next round. A resumed run therefore keeps its engine,
and a run that was stopped before the check repeats it after the same round.
"""

import time
from collections.abc import Callable, Sequence

import torch

from .cost import Workload
from .interface import ClientUpdates, Engine, TrainingRun, TrainRequest
from .plain import PlainEngine

CHECK_AT = 0.1  # fraction of the estimated work after which the estimate is checked
WRONG_BY = 3.0  # the estimate counts as wrong if training is this many times slower
ENOUGH_ROUNDS = 2  # the first round is not counted, because libraries are initialised in it
Measure = Callable[[PlainEngine], float]  # times a few steps and returns how many times slower than estimated they are
Reselect = Callable[[PlainEngine, Sequence[TrainingRun], float], Engine]  # selects an engine, given how many times slower the runs are


class Provisional(PlainEngine):
    """The plain engine, timed until the estimate is checked."""

    def __init__(self, runs: Sequence[TrainingRun], work: Workload, worth_it: float, measure: Measure, reselect: Reselect) -> None:
        problem = runs[0].problem
        super().__init__(problem.model, problem.clients, problem.loss)
        self.estimated, self.worth_it, self.measure, self.reselect = work, worth_it, measure, reselect
        self.clock = clock(problem.device)
        self.took: list[tuple[float, float]] = []  # seconds of each round: measured, estimated
        self.checked = work.done(-1) >= CHECK_AT * work.total  # True if the run was resumed after the check

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        if self.checked:
            return super().train(requests)
        start = self.clock()
        updates = super().train(requests)
        if self.clients.device.type == "cuda":
            torch.cuda.synchronize(self.clients.device)
        self.took.append((self.clock() - start, self.estimated.done(1) - self.estimated.done()))
        return updates

    def next_engine(self, live: Sequence[TrainingRun]) -> Engine:
        """Return the engine for the next round of these runs."""
        if self.checked or self.estimated.done() < CHECK_AT * self.estimated.total:
            return self
        self.checked = True
        slower = self._slower()
        if slower <= WRONG_BY or slower * self.estimated.left() <= self.worth_it:
            return self
        engine = self.reselect(self, live, slower)
        for run in live:
            run.engine = engine.label
            run.checkpoint()
        return engine

    def _slower(self) -> float:
        if len(self.took) < ENOUGH_ROUNDS:
            return self.measure(self)
        counted = self.took[1:]
        return sum(took for took, _ in counted) / max(sum(estimated for _, estimated in counted), 1e-9)


def clock(device: torch.device) -> Callable[[], float]:
    """Return a clock: processor time of this thread, or wall-clock time for a GPU, which works asynchronously."""
    return time.perf_counter if device.type == "cuda" else time.thread_time


def next_engine(engine: Engine, live: Sequence[TrainingRun]) -> Engine:
    """Return the engine for the next round: the same one, unless it was chosen for a short run that proves long."""
    return engine.next_engine(live) if isinstance(engine, Provisional) else engine
