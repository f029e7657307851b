"""Tries engines on a run's data: checks that an engine matches plain, and measures its speed. A trial does not change the run."""

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..settings import engine_parts
from ..settings.declare import MOST_LANES
from .capabilities import TOLERANCE, Unsupported, agree, unsupported_on_error
from .create import create
from .equality import Reference, few_steps
from .interface import Engine, TrainingRun, TrainRequest
from .plain import PlainEngine
from .stacked.jobs import Needs
from .stacked.lane_engine import LaneEngine
from .stacked.lanes import width

TRIAL_STEPS = 4


class Trial:
    """Tries engines on a few steps of as many clients as a typical round has."""

    def __init__(self, runs: Sequence[TrainingRun], plain: PlainEngine) -> None:
        self.runs, self.plain, self.problem = runs, plain, runs[0].problem

    @cached_property
    def requests(self) -> list[TrainRequest]:
        usual = [max(1, round(float(np.median(run.active.sum(axis=1))))) for run in self.runs]
        return [few_steps(run, list(range(m)), TRIAL_STEPS) for run, m in zip(self.runs, usual, strict=True)]

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.runs[0], self.plain)

    def prepared(self, name: str) -> Engine:
        """Prepare an engine and check it against plain. Raises `Unsupported` if a check fails or if the engine raises any error."""
        with unsupported_on_error():
            if engine_parts(name)[0] != "workers":  # workers train as plain does, on the loss of whole batches
                if reason := self.problem.local.only_in_pytorch:
                    raise Unsupported(reason)
                self.reference.check_loss()
            engine = make(name, self.runs)
            self.check(engine)
            if engine.name != "workers":
                self.reference.check_samples()  # last: the other reasons are more specific
        return engine

    def check(self, engine: Engine) -> None:
        """Compare with plain: the training of some clients of the first run, without dropout, and the test outputs."""
        compiled, no_dropout = getattr(engine, "compiled", False), self.reference.no_dropout
        checked = engine.like(no_dropout or self.problem.model) if no_dropout is not None or compiled else engine
        self.reference.check_training(checked)
        self.reference.check_evaluation(engine)
        if checked is not engine and not compiled:
            engine.train(self.reference.requests[:1])  # with dropout: unsupported random layers are found here, not in the first round

    def check_compiled(self, engine: Any) -> None:
        """Compare the compiled step with the uncompiled one; both draw the same dropout masks."""
        with unsupported_on_error():
            request = self.reference.requests[:1]
            uncompiled = engine.like(self.problem.model)
            agree(engine.train(request)[0], uncompiled.train(request)[0], TOLERANCE[self.problem.precision])

    def seconds(self, engine: Engine) -> float:
        """Measure the seconds per client-step."""
        if engine is self.plain:  # its time is linear in the clients, so one client is enough; long steps are measured only once
            one = [few_steps(self.runs[0], [0], TRIAL_STEPS)]
            took = seconds_per_step(engine, one)
            return took if took * TRIAL_STEPS > 0.5 else min(took, seconds_per_step(engine, one))
        with unsupported_on_error():
            engine.train(self.requests)  # builds, captures and warms up outside the timing
            return min(seconds_per_step(engine, self.requests) for _ in range(2))


def seconds_per_step(engine: Engine, requests: Sequence[TrainRequest], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    updates = engine.train(requests)
    steps = sum(int(update.K.sum()) for update in updates)  # also waits until a GPU has finished
    return (clock() - start) / steps


def make(label: str, runs: Sequence[TrainingRun], compiled: bool = False) -> Engine:
    """Create an engine from its name, or from the label in a checkpoint (`batched:64:compiled`)."""
    name, lanes, _ = engine_parts(label)
    problem = runs[0].problem
    if name in MOST_LANES:
        lanes = lanes or width(clients_per_round(runs), problem.device)
    engine: Engine = create(label, problem.model, problem.clients, problem.loss, problem.precision, lanes, compiled)
    if isinstance(engine, LaneEngine):
        engine.prepare(Needs.of([run.example_request() for run in runs]))
    return engine


def clients_per_round(runs: Sequence[TrainingRun]) -> list[int]:
    """Return the number of active clients per round, summed over the runs."""
    counts = np.zeros(max(run.rounds for run in runs), dtype=int)
    for run in runs:
        counts[: run.rounds] += run.active.sum(axis=1)
    return counts.tolist()
