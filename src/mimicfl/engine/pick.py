"""Which cohort trains the clients: the one asked for, or the fastest that fits, found by trying."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..config import engine_parts
from ..errors import UsageError
from .cohort import Ask, Cohort, PlainCohort
from .cost import Cost, Workload
from .drive import exact, own_threads
from .equality import Reference, few_steps
from .jobs import Needs
from .lanes import width
from .provisional import Provisional, clock
from .run import Run
from .support import TOLERANCE, Unsupported, agree, cannot

WORTH_IT = 2.0  # seconds of plain training, by rough estimate, below which preparing another engine would only delay the run
WORTH_COMPILING = 60.0  # seconds of training in lanes below which the compiler would only delay it
TRIAL_STEPS = 4
COMPILE = ("batched", "streams")  # the engines that can use a compiler
Notice = Callable[[str], None]


def check_engine(engine: str, device: torch.device) -> None:
    """Refuse what this device cannot have at all; what only the model cannot have falls back to plain."""
    name, _, _ = engine_parts(engine)
    if name == "streams" and device.type != "cuda":
        raise UsageError("engine streams needs a GPU: use device cuda, or engine auto")
    if name in ("native", "workers") and device.type != "cpu":
        raise UsageError(f"engine {name} runs on the CPU: use device cpu, or engine auto")


def pick(engine: str, runs: Sequence[Run], notice: Notice | None = None) -> tuple[Cohort, str]:
    """A cohort for these runs, and one sentence that says which and why; `notice` is called if the engine changes during the run."""
    first = runs[0]
    plain = PlainCohort(first.template, first.clients, first.loss)
    wanted = _wanted(engine, {run.engine for run in runs if run.rows})
    with exact(first.precision):
        if wanted == "auto":
            cohort, why = _auto(runs, plain, notice)
        elif wanted == "plain":
            cohort, why = plain, "engine plain"
            if engine == "auto" and "MIMICFL_ENGINE" not in os.environ and (work := Workload(runs)).total < WORTH_IT:
                cohort = _provisional(runs, work, notice)  # resumed: the estimate may not have been checked yet
        else:
            cohort, why = _asked_for(wanted, runs, plain)
    why += _began_otherwise(runs, cohort)
    fix_threads(runs, cohort)
    return cohort, why


def _wanted(engine: str, was: set[str]) -> str:
    """The engine to use. A resumed run keeps its engine and lanes, to end bit-equal; runs that have not started use the same one."""
    if len(was) == 1 and engine in ("auto", engine_parts(*was)[0]):
        return was.pop()
    return os.environ.get("MIMICFL_ENGINE", "auto") if engine == "auto" else engine


def _began_otherwise(runs: Sequence[Run], cohort: Cohort) -> str:
    """A note for runs that are resumed on a different engine: they are no longer bit-equal."""
    begun = [run for run in runs if run.rows]
    others = sorted({run.engine for run in begun if run.engine != cohort.label})
    if len({run.threads for run in begun}) > 1:
        others.append("different numbers of threads")
    return f"; resumed from {' and '.join(others)}, so the result will equal an uninterrupted run only up to rounding" if others else ""


def fix_threads(runs: Sequence[Run], cohort: Cohort) -> None:
    """Fix the number of threads, which a resumed run keeps because sums depend on it; those of native do not."""
    usual = torch.get_num_threads()
    kept = {run.threads for run in runs if run.rows and run.engine == cohort.label} - {0}
    if cohort.name == "native" or runs[0].device.type == "cuda":
        count = 0
    elif kept:
        count = kept.pop()
    elif cohort.name == "plain" and usual > 1 and Cost.of(runs[0]).small(max(runs[0].local.batch_sizes(int(runs[0].clients.sizes.max())))):
        count = 1
    else:
        count = usual
    for run in runs:
        run.threads = count


def _auto(runs: Sequence[Run], plain: PlainCohort, notice: Notice | None) -> tuple[Cohort, str]:
    work = Workload(runs)
    seconds = work.left()
    if seconds >= WORTH_IT:
        return _fastest(runs, plain, seconds)
    why = f"engine plain: training is estimated at {seconds:.1f} s, too short to benefit from a faster engine"
    return _provisional(runs, work, notice), why


def _provisional(runs: Sequence[Run], work: Workload, notice: Notice | None) -> Provisional:
    """Plain, for runs that are estimated to be short; if they prove longer, the fastest engine is selected after all."""
    usual = torch.get_num_threads()

    def measure(plain: PlainCohort) -> float:
        ask = few_steps(runs[0], [0], TRIAL_STEPS)
        sizes = np.array(ask.local.batch_sizes(int(ask.clients.sizes[0])))
        return trial(plain, [ask], clock(runs[0].device)) / float(work.cost.step(sizes, runs[0].device.type).mean())

    def reselect(plain: PlainCohort, live: Sequence[Run], slower: float) -> Cohort:
        with own_threads(usual):
            cohort, why = _fastest(live, plain, slower * work.left())
            fix_threads(live, cohort)
        if notice:
            notice(f"{why}; selected again in round {live[0].t}, since training is {slower:.0f} times slower than estimated")
        return cohort

    return Provisional(runs, work, WORTH_IT, measure, reselect)


def _asked_for(engine: str, runs: Sequence[Run], plain: PlainCohort) -> tuple[Cohort, str]:
    trial = Trial(runs, plain)
    try:
        cohort = trial.prepared(engine)
    except Unsupported as reason:
        return plain, f"engine plain: {reason}, so {engine} cannot run it"
    if getattr(cohort, "compiled", False):
        try:
            trial.check_compiled(cohort)
        except Unsupported as reason:  # what was traced still runs, and many times as fast as plain
            name, lanes, _ = engine_parts(engine)
            return make(f"{name}:{lanes}", runs), f"engine {name}, not compiled: {reason}"
    return cohort, f"engine {cohort.name}"


def _fastest(runs: Sequence[Run], plain: PlainCohort, seconds: float) -> tuple[Cohort, str]:
    trial = Trial(runs, plain)
    took: dict[Cohort, float] = {plain: trial.of(plain)}
    reasons = []
    for name in ("native", "workers") if runs[0].device.type == "cpu" else ("batched", "streams"):
        best = min(took, key=took.__getitem__)
        if name == "workers" and best.name == "native":
            continue  # compiled code on the same cores has nothing to fear from processes
        try:
            cohort = trial.prepared(name)
            took[cohort] = trial.of(cohort)
        except Unsupported as reason:
            reasons.append(f"{name} cannot: {reason}")
    best = min(took, key=took.__getitem__)
    if best.name in COMPILE and seconds * took[best] / took[plain] > WORTH_COMPILING:
        with contextlib.suppress(Unsupported), cannot():  # a step that runs may still fail to compile
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


class Trial:
    """A few steps of as many clients as a usual round has; nothing of it is kept."""

    def __init__(self, runs: Sequence[Run], plain: PlainCohort) -> None:
        self.runs, self.plain = runs, plain

    @cached_property
    def asks(self) -> list[Ask]:
        usual = [max(1, round(float(np.median(run.available.sum(axis=1))))) for run in self.runs]
        return [few_steps(run, list(range(m)), TRIAL_STEPS) for run, m in zip(self.runs, usual, strict=True)]

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.runs[0], self.plain)

    def prepared(self, engine: str) -> Cohort:
        """A cohort that passed all checks against plain; any error it raises means that it cannot run this model."""
        with cannot():
            if engine_parts(engine)[0] != "workers":  # workers train as plain does, on the loss of whole batches
                self.reference.check_loss()
            cohort = make(engine, self.runs)
            self.check(cohort)
            if cohort.name != "workers":
                self.reference.check_samples()  # last: the other reasons are more specific
        return cohort

    def check(self, cohort: Cohort) -> None:
        """Compare the training of some clients of the first run, without dropout, and the test outputs with plain."""
        compiled, quiet = getattr(cohort, "compiled", False), self.reference.quiet
        checked = cohort.like(quiet or self.runs[0].template) if quiet is not None or compiled else cohort
        self.reference.check_training(checked)
        self.reference.check_evaluation(cohort)
        if checked is not cohort and not compiled:
            cohort.train(self.reference.asks[:1])  # with dropout: unsupported random layers are found here, not in the first round

    def check_compiled(self, cohort: Any) -> None:
        """What the compiler made against what it was given: both draw the same dropout."""
        with cannot():
            ask = self.reference.asks[:1]
            agree(cohort.train(ask)[0], cohort.like(self.runs[0].template).train(ask)[0], TOLERANCE[self.runs[0].precision])

    def of(self, cohort: Cohort) -> float:
        """Seconds per client-step."""
        if cohort is self.plain:  # linear in the clients: one will do, and one trial where a step is long
            one = [few_steps(self.runs[0], [0], TRIAL_STEPS)]
            took = trial(cohort, one)
            return took if took * TRIAL_STEPS > 0.5 else min(took, trial(cohort, one))
        with cannot():
            cohort.train(self.asks)  # builds, captures, warms up
            return min(trial(cohort, self.asks) for _ in range(2))


def trial(cohort: Cohort, asks: Sequence[Ask], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    answers = cohort.train(asks)
    steps = sum(int(answer.K.sum()) for answer in answers)  # waits for a GPU
    return (clock() - start) / steps
