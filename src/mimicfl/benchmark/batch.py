"""Train a batch of runs together and measure those that end."""

from collections.abc import Sequence
from pathlib import Path

from ..callbacks.interface import Callback, EachRound
from ..errors import Diverged, Paused
from ..experiments.execute import Plan, Progress, run_plan
from ..files import scratch
from ..metrics.environment import environment
from ..metrics.find import is_finished
from ..metrics.history import read
from ..metrics.store import RunFolder
from ..settings import Experiment
from .measure import Result, measure, score_only

Callbacks = Sequence[Callback | EachRound]


def train_batch(
    plan: Plan, target: float, out: Path, until: float | None, progress: Progress | None = None, callbacks: Callbacks = ()
) -> dict[str, Result]:
    """The results of the runs that end before `until`, a time of `time.monotonic`, by name; the others can be resumed in `out`."""
    failures: dict[str, str] = {}
    try:
        with scratch():
            run_plan(plan, out, progress, until=until, callbacks=callbacks)
    except Paused:
        pass
    except Diverged as error:
        failures = error.runs
    found = {name: _result(name, e, target, out, failures.get(name)) for name, e in plan.items()}
    return {name: result for name, result in found.items() if result is not None}


def _result(name: str, e: Experiment, target: float, out: Path, failure: str | None) -> Result | None:
    kind = {"stage": "tuning" if e.validation else "final", "seed": e.seed, "algorithm": e.algorithm, "lr": e.lr, "global_lr": e.global_lr}
    if failure is not None:
        return kind | {"environment": environment(), "diverged": failure}
    if not is_finished(out / name):
        return None
    run = read(RunFolder(out / name))
    return kind | {"environment": run.environment} | (score_only(run) if e.validation else measure(run, target))
