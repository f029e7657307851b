"""Selects the engine of a run: the requested one, or the fastest one that matches plain, found by measurement."""

import contextlib
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..errors import UsageError
from ..problem import Problem
from ..settings import engine_parts
from .capabilities import Unsupported, unsupported_on_error
from .cluster.engine import RayEngine, cluster_parts
from .cost import Workload, threads_for
from .equality import few_steps
from .interface import Engine, TrainingRun
from .plain import PlainEngine
from .provisional import Provisional, clock
from .torch_settings import exact, own_threads
from .trial import TRIAL_STEPS, Trial, make, seconds_per_step

WORTH_IT = 2.0  # estimated seconds of plain training below which preparing another engine would only delay the run
FAR_AHEAD = 10.0  # times as fast as plain: other engines are then rarely faster than native, and preparing them takes longer than it saves
AGAIN = 2  # how often engines are measured again, at most, if plain seems to be the fastest
WORTH_COMPILING = 60.0  # seconds of training on the best engine below which compiling would only delay the run
COMPILE = ("batched", "streams")  # the engines that can use a compiler
Notice = Callable[[str], None]


def check_engine(name: str, device: torch.device) -> None:
    """Raise `UsageError` if this device cannot run the engine. An engine that only the model rules out falls back to plain later."""
    kind, _, _ = engine_parts(name)
    if kind == "streams" and device.type != "cuda":
        raise UsageError("engine streams needs a GPU: use device cuda, or engine auto")
    if kind == "workers" and device.type != "cpu":
        raise UsageError("engine workers runs on the CPU: use device cpu, or engine auto")


def select_engine(name: str, runs: Sequence[TrainingRun], notice: Notice | None = None, ray: str = "") -> tuple[Engine, str]:
    """Return an engine for these runs and a sentence with the reason. `notice` is called if the engine changes during the run.

    With `ray`, the address of a cluster, its workers train with the engine that is selected here.
    """
    problem = runs[0].problem
    plain = PlainEngine(problem.model, problem.clients, problem.loss)
    was = {cluster_parts(run.engine) for run in runs if run.t}
    wanted = _wanted(name, {label for _, label in was})
    with exact(problem.precision):
        if wanted == "auto":
            engine, why = _auto(runs, plain, notice)
        elif wanted == "plain":
            engine, why = plain, "engine plain"
            if name == "auto" and "MIMICFL_ENGINE" not in os.environ and (work := Workload(runs)).total < WORTH_IT:
                engine = _provisional(runs, work, notice)  # resumed: the estimate may not have been checked yet
        else:
            engine, why = _requested(wanted, runs, plain)
    if ray:
        groups = was.pop()[0] if len(was) == 1 else 0
        on_cluster = RayEngine.start(ray, engine, runs, groups, notice)
        engine, why = on_cluster, f"{why}, on {on_cluster.pool.size} workers of a Ray cluster"
    why += _resumed_from(runs, engine)
    fix_threads(runs, engine)
    return engine, why


def _wanted(name: str, was: set[str]) -> str:
    """Return the engine to try. Resumed runs keep their engine and lanes to end bit-equal; new runs in the same group use them too."""
    if len(was) == 1 and name in ("auto", engine_parts(*was)[0]):
        return was.pop()
    return os.environ.get("MIMICFL_ENGINE", "auto") if name == "auto" else name


def _resumed_from(runs: Sequence[TrainingRun], engine: Engine) -> str:
    """Return a note for runs that are resumed on a different engine and are therefore no longer bit-equal."""
    begun = [run for run in runs if run.t]
    others = sorted({run.engine for run in begun if run.engine != engine.label})
    if len({run.threads for run in begun}) > 1:
        others.append("different numbers of threads")
    return f"; resumed from {' and '.join(others)}, so the result will equal an uninterrupted run only up to rounding" if others else ""


def fix_threads(runs: Sequence[TrainingRun], engine: Engine) -> None:
    """Set the number of threads. Sums depend on it, so a resumed run keeps it; native results do not depend on it."""
    usual, problem = torch.get_num_threads(), runs[0].problem
    kept = {run.threads for run in runs if run.t and run.engine == engine.label} - {0}
    if engine.name == "native" or problem.device.type == "cuda":
        count = 0
    elif kept:
        count = kept.pop()
    elif engine.name == "plain":
        count = threads_of_plain(problem)
    else:
        count = usual
    for run in runs:
        run.threads = count


def threads_of_plain(problem: Problem) -> int:
    """Return the number of threads for plain training: one if the local steps are too small for several."""
    largest = max(problem.local.batch_sizes(int(problem.clients.sizes.max())))
    return threads_for(problem.template, problem.clients, problem.loss, largest)


def _auto(runs: Sequence[TrainingRun], plain: PlainEngine, notice: Notice | None) -> tuple[Engine, str]:
    work = Workload(runs)
    seconds = work.left()
    if seconds >= WORTH_IT:
        return _fastest(runs, plain, seconds)
    why = f"engine plain: training is estimated at {seconds:.1f} s, too short to benefit from a faster engine"
    return _provisional(runs, work, notice), why


def _provisional(runs: Sequence[TrainingRun], work: Workload, notice: Notice | None) -> Provisional:
    """Return plain for runs that are estimated to be short; if the estimate proves wrong, it selects the fastest engine."""
    usual, device = torch.get_num_threads(), runs[0].problem.device

    def measure(plain: PlainEngine) -> float:
        request = few_steps(runs[0], [0], TRIAL_STEPS)
        sizes = np.array(request.local.batch_sizes(int(request.clients.sizes[0])))
        return seconds_per_step(plain, [request], clock(device)) / float(work.cost.step(sizes, device.type).mean())

    def reselect(plain: PlainEngine, live: Sequence[TrainingRun], slower: float) -> Engine:
        with own_threads(usual):
            engine, why = _fastest(live, plain, slower * work.left())
            fix_threads(live, engine)
        if notice:
            notice(f"{why}; selected again in round {live[0].t}, since training is {slower:.0f} times slower than estimated")
        return engine

    return Provisional(runs, work, WORTH_IT, measure, reselect)


def _requested(name: str, runs: Sequence[TrainingRun], plain: PlainEngine) -> tuple[Engine, str]:
    trial = Trial(runs, plain)
    try:
        engine = trial.prepared(name)
    except Unsupported as reason:
        return plain, f"engine plain: {reason}, so {name} cannot run it"
    if getattr(engine, "compiled", False):
        try:
            trial.check_compiled(engine)
        except Unsupported as reason:  # the traced step still works, and is many times as fast as plain
            kind, lanes, _ = engine_parts(name)
            return make(f"{kind}:{lanes}", runs), f"engine {kind}, not compiled: {reason}"
    return engine, f"engine {engine.name}"


def _time(trial: Trial, engine: Engine) -> float:
    """Measure an engine with the threads that the run would use: with more, small steps of plain may take 100 times as long."""
    if engine is not trial.plain:
        return trial.seconds(engine)
    with own_threads(threads_of_plain(trial.problem)):
        return trial.seconds(engine)


def _fastest(runs: Sequence[TrainingRun], plain: PlainEngine, seconds: float) -> tuple[Engine, str]:
    trial = Trial(runs, plain)
    took: dict[Engine, float] = {plain: _time(trial, plain)}
    reasons = []
    for name in ("native", "workers") if trial.problem.device.type == "cpu" else ("native", "batched", "streams"):
        best = min(took, key=took.__getitem__)
        if name == "workers" and best.name == "native":
            continue  # processes on the same cores cannot beat compiled code
        if best.name == "native" and took[plain] > FAR_AHEAD * took[best]:
            continue
        try:
            engine = trial.prepared(name)
            took[engine] = trial.seconds(engine)
        except Unsupported as reason:
            reasons.append(f"{name} cannot be used: {reason}")
    for _ in range(AGAIN if len(took) > 1 else 0):  # another program may have delayed the faster engine
        if min(took, key=took.__getitem__) is plain:
            with contextlib.suppress(Unsupported):
                took = {engine: min(before, _time(trial, engine)) for engine, before in took.items()}
    best = min(took, key=took.__getitem__)
    if best.name in COMPILE and seconds * took[best] / took[plain] > WORTH_COMPILING:
        with contextlib.suppress(Unsupported), unsupported_on_error():  # a step that runs may still fail to compile
            compiled = make(best.name, runs, compiled=True)
            trial.check_compiled(compiled)
            took[compiled] = trial.seconds(compiled)
            best = min(best, compiled, key=took.__getitem__)
    if best is plain:
        others = sorted((seconds, engine.name) for engine, seconds in took.items() if engine is not plain)
        why = f"measured {others[0][0] / took[plain]:.1f} times as fast as {others[0][1]} here" if others else "; ".join(reasons)
        return plain, f"engine plain: {why}"
    ratio = took[plain] / took[best]
    return best, f"engine {best.name}: measured {ratio:.{int(ratio < 3)}f} times as fast as plain here"
