"""Which cohort trains the clients: the one asked for, or the fastest that fits, found by trying."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..algorithms import Task
from ..config import engine_parts
from ..data.clients import Clients
from ..errors import UsageError
from ..local.update import LocalSGD
from .calls import without_dropout
from .cohort import Answers, Ask, Cohort, PlainCohort
from .drive import exact
from .jobs import Needs
from .lanes import width
from .run import Run
from .support import TOLERANCE, Unsupported, agree

WORTH_IT = 2.0  # seconds of plain training, by rough estimate, below which preparing another engine would only delay the run
WORTH_COMPILING = 60.0  # seconds of training in lanes below which the compiler would only delay it
PLAIN_STEP, PLAIN_FLOPS = {"cpu": 2e-4, "cuda": 2e-3}, {"cpu": 5e9, "cuda": 1e13}  # that estimate: overhead of a step, arithmetic a second
TRIAL_STEPS = 4
COMPILE = ("batched", "streams")  # the engines that can use a compiler


def check_engine(engine: str, device: torch.device) -> None:
    """Refuse what this device cannot have at all; what only the model cannot have falls back to plain."""
    name, _, _ = engine_parts(engine)
    if name == "streams" and device.type != "cuda":
        raise UsageError("engine streams needs a GPU: use device cuda, or engine auto")
    if name in ("native", "workers") and device.type != "cpu":
        raise UsageError(f"engine {name} runs on the CPU: use device cpu, or engine auto")


def pick(engine: str, runs: Sequence[Run]) -> tuple[Cohort, str]:
    """A cohort for these runs, and one sentence that says which and why."""
    first = runs[0]
    was = {run.engine for run in runs if run.rows}
    mixed = "; these runs began on different engines and will end equal up to rounding only" if engine == "auto" and len(was) > 1 else ""
    resumed = engine == "auto" and len(was) == 1  # runs at their first round still join those that have begun
    if engine == "auto":  # a resumed run keeps its engine, to end bit-equal
        engine = was.pop() if resumed else os.environ.get("MIMICFL_ENGINE", "auto")
    plain = PlainCohort(first.template, first.clients, first.loss)
    if engine == "plain":
        return plain, "engine plain"
    seconds = estimate(runs)
    if engine == "auto" and seconds < WORTH_IT:
        return plain, f"engine plain: about {seconds:.1f} s of work, too little to prepare another for"
    with exact(first.precision):
        if engine != "auto":
            return _asked_for(engine, runs, plain, resumed)
        cohort, why = _fastest(runs, plain, seconds)
        return cohort, why + mixed


def _asked_for(engine: str, runs: Sequence[Run], plain: Cohort, resumed: bool) -> tuple[Cohort, str]:
    trial = Trial(runs, plain)
    try:
        cohort = make(engine, runs)
        trial.check(cohort)
    except Unsupported as reason:
        note = "; the run began on another engine, so it will end equal up to rounding only" if resumed else f", so {engine} cannot run it"
        return plain, f"engine plain: {reason}{note}"
    if getattr(cohort, "compiled", False):
        try:
            trial.check_compiled(cohort)
        except Unsupported as reason:  # what was traced still runs, and many times as fast as plain
            name, lanes, _ = engine_parts(engine)
            return make(f"{name}:{lanes}", runs), f"engine {name}, not compiled: {reason}"
    return cohort, f"engine {cohort.name}"


def _fastest(runs: Sequence[Run], plain: Cohort, seconds: float) -> tuple[Cohort, str]:
    trial = Trial(runs, plain)
    took: dict[Cohort, float] = {plain: trial.of(plain)}
    reasons = []
    for name in ("native", "workers") if runs[0].device.type == "cpu" else ("batched", "streams"):
        best = min(took, key=took.__getitem__)
        if name == "workers" and best.name == "native":
            continue  # compiled code on the same cores has nothing to fear from processes
        try:
            cohort = make(name, runs)
            trial.check(cohort)
            took[cohort] = trial.of(cohort)
        except Unsupported as reason:
            reasons.append(f"{name} cannot: {reason}")
    best = min(took, key=took.__getitem__)
    if best.name in COMPILE and seconds * took[best] / took[plain] > WORTH_COMPILING:
        with contextlib.suppress(Unsupported):  # what runs may still not compile
            compiled = make(best.name, runs, compiled=True)
            trial.check_compiled(compiled)
            took[compiled] = trial.of(compiled)
            best = min(best, compiled, key=took.__getitem__)
    if best is plain:
        others = sorted((seconds, cohort.name) for cohort, seconds in took.items() if cohort is not plain)
        why = f"measured {others[0][0] / took[plain]:.1f} times as fast as {others[0][1]} here" if others else "; ".join(reasons)
        return plain, f"engine plain: {why}"
    ratio = took[plain] / took[best]
    return best, f"engine {best.name}: measured {ratio:.{int(ratio < 3)}f} times as fast as plain here"


def make(label: str, runs: Sequence[Run], compiled: bool = False) -> Cohort:
    """A cohort by its name, or by the label a checkpoint keeps of it (`batched:64:compiled`)."""
    name, lanes, asked = engine_parts(label)
    run = runs[0]
    what = (run.template, run.clients, run.loss)
    if name == "native":
        from .native.cohort import NativeCohort

        return NativeCohort(*what)
    if name == "workers":
        from .workers import WorkersCohort

        return WorkersCohort(*what)
    needs = Needs.of([ask for run in runs if (ask := run.ask_anybody())])
    lanes, compiled = lanes or width(jobs_a_round(runs), run.device), compiled or asked
    cohort: Any
    if name == "batched":
        from .batched.cohort import BatchedCohort

        cohort = BatchedCohort(*what, run.precision, lanes, compiled)
    else:
        from .streams import StreamsCohort

        cohort = StreamsCohort(*what, run.precision, min(lanes, StreamsCohort.MOST), compiled)
    cohort.prepare(needs)
    return cohort  # type: ignore[no-any-return]


def jobs_a_round(runs: Sequence[Run]) -> list[int]:
    """How many clients train together in each round from the first on."""
    counts = np.zeros(max(run.rounds for run in runs), dtype=int)
    for run in runs:
        counts[: run.rounds] += run.available.sum(axis=1)
    return counts.tolist()


def estimate(runs: Sequence[Run]) -> float:
    """Seconds the plain cohort would take, very roughly, from the work alone: it must not depend on the moment."""
    total = 0.0
    for run in runs:
        steps = samples = 0
        for client in np.flatnonzero(times := run.available[run.t :].sum(axis=0)).tolist():
            sizes = run.local.batch_sizes(int(run.clients.sizes[client]), client)
            steps += int(times[client]) * len(sizes)
            samples += int(times[client]) * sum(sizes)
        kind = run.device.type
        total += steps * PLAIN_STEP[kind] + samples * 6 * run.work.w.numel() / PLAIN_FLOPS[kind]
    return total


class Trial:
    """A few steps of as many clients as a usual round has; nothing of it is kept."""

    def __init__(self, runs: Sequence[Run], plain: Cohort) -> None:
        self.runs, self.plain = runs, plain
        self.asks = [_few_steps(run, max(1, round(float(np.median(run.available.sum(axis=1)))))) for run in runs]
        self.truth: Answers | None = None

    def check(self, cohort: Cohort) -> None:
        """The first clients of the first run, against the plain cohort; dropout aside, which every engine draws in its own way."""
        run, ask = self.runs[0], _few_steps(self.runs[0], 2)
        quiet = without_dropout(run.template, run.clients.data.inputs(run.clients.x[:2], run.clients.dtype))
        plain = self.plain if quiet is None else PlainCohort(quiet, run.clients, run.loss)
        checked = cohort.like(quiet or run.template) if quiet is not None or getattr(cohort, "compiled", False) else cohort
        agree(checked.train([ask])[0], plain.train([ask])[0], TOLERANCE[run.precision])
        if checked is not cohort and not getattr(cohort, "compiled", False):
            cohort.train([ask])  # with its own chance: layers that cannot be drawn are found here, not in the first round

    def check_compiled(self, cohort: Any) -> None:
        """What the compiler made against what it was given: both draw the same dropout."""
        run, ask = self.runs[0], _few_steps(self.runs[0], 2)
        agree(cohort.train([ask])[0], cohort.like(run.template).train([ask])[0], TOLERANCE[run.precision])

    def of(self, cohort: Cohort) -> float:
        """Seconds per client-step."""
        if cohort is self.plain:  # linear in the clients: one will do, and one trial where a step is long
            took = trial(cohort, [_few_steps(self.runs[0], 1)])
            return took if took * TRIAL_STEPS > 0.5 else min(took, trial(cohort, [_few_steps(self.runs[0], 1)]))
        cohort.train(self.asks)  # builds, captures, warms up
        return min(trial(cohort, self.asks) for _ in range(2))


def trial(cohort: Cohort, asks: Sequence[Ask]) -> float:
    start = time.perf_counter()
    answers = cohort.train(asks)
    steps = sum(int(answer.K.sum()) for answer in answers)  # waits for a GPU
    return (time.perf_counter() - start) / steps


def _few_steps(run: Run, clients: int) -> Ask:
    """The run's first clients with little data: some full batches and one that is not."""
    batch = max(run.local.batch_sizes(int(run.clients.sizes.max())))
    parts = [part[: (TRIAL_STEPS - 1) * batch + max(1, batch // 2)] for part in run.split[:clients]]
    ask = run.ask_anybody()
    few = Clients(run.data, parts, run.device, run.work.w.dtype)
    local = LocalSGD(steps=TRIAL_STEPS, batch_size=run.local.batch_size, momentum=run.local.momentum, clip_norm=run.local.clip_norm)
    shift = ask.task.shift if isinstance(ask.task.shift, float) else ask.task.shift[:1].expand(len(parts), -1)
    task = Task(shift, ask.task.mu)
    return dataclasses.replace(ask, clients=few, local=local, active=np.arange(len(parts)), task=task, eta_L=1e-6, eta=1e-6)
