"""Plain for a run that was estimated to be short, and another engine if the first tenth shows that the estimate was wrong.

The estimate is checked once, at a round that follows from the schedule alone, by the processor time of the training thread, which a busy
machine hardly changes. The decision is saved with the state before the next round is trained. So a resumed run keeps the
engine that it had, and a run stopped before the check makes it in the same round.
"""

import time
from collections.abc import Callable, Sequence

import torch

from .cohort import Answers, Ask, Cohort, PlainCohort
from .cost import Workload
from .run import Run

LOOK_AT = 0.1  # of the estimated work: when the estimate is checked
WRONG_BY = 3.0
ENOUGH_ROUNDS = 2  # the first is not counted: libraries initialise in it
Measure = Callable[[PlainCohort], float]  # runs a few steps: how many times slower than estimated they are
Reselect = Callable[[PlainCohort, Sequence[Run], float], Cohort]  # the cohort for these runs, given how many times slower they are


class Provisional(PlainCohort):
    """The plain cohort, timed until the estimate is checked."""

    def __init__(self, runs: Sequence[Run], work: Workload, worth_it: float, measure: Measure, reselect: Reselect) -> None:
        first = runs[0]
        super().__init__(first.template, first.clients, first.loss)
        self.estimated, self.worth_it, self.measure, self.reselect = work, worth_it, measure, reselect
        self.clock = clock(first.device)
        self.took: list[tuple[float, float]] = []  # seconds of each round: measured, estimated
        self.looked = work.done(-1) >= LOOK_AT * work.total  # resumed after the check

    def train(self, asks: Sequence[Ask]) -> list[Answers]:
        if self.looked:
            return super().train(asks)
        start = self.clock()
        answers = super().train(asks)
        if self.clients.device.type == "cuda":
            torch.cuda.synchronize(self.clients.device)
        self.took.append((self.clock() - start, self.estimated.done(1) - self.estimated.done()))
        return answers

    def settled(self, live: Sequence[Run]) -> Cohort:
        """The cohort for the next round of these runs."""
        if self.looked or self.estimated.done() < LOOK_AT * self.estimated.total:
            return self
        self.looked = True
        slower = self._slower()
        if slower <= WRONG_BY or slower * self.estimated.left() <= self.worth_it:
            return self
        cohort = self.reselect(self, live, slower)
        for run in live:
            run.engine = cohort.label
            if run.keeper is not None:
                run.keeper.checkpoint()
        return cohort

    def _slower(self) -> float:
        if len(self.took) < ENOUGH_ROUNDS:
            return self.measure(self)
        counted = self.took[1:]
        return sum(took for took, _ in counted) / max(sum(estimated for _, estimated in counted), 1e-9)


def clock(device: torch.device) -> Callable[[], float]:
    """Processor time of this thread; wall-clock time on a GPU, which works asynchronously."""
    return time.perf_counter if device.type == "cuda" else time.thread_time


def settled(cohort: Cohort, live: Sequence[Run]) -> Cohort:
    """The cohort for the next round: the same, unless it was chosen for a short run that proves long."""
    return cohort.settled(live) if isinstance(cohort, Provisional) else cohort
