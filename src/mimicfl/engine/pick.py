"""Which cohort trains the clients: the one asked for, or the fastest that fits."""

import dataclasses
import os
import time
from typing import Any

import numpy as np

from ..algorithms import Task
from ..errors import UsageError
from .cohort import Ask, PlainCohort
from .native import Unsupported
from .run import Run

WORTH_IT = 2.0  # seconds of plain training, by rough estimate, below which compiling would only delay the run
PLAIN_STEP, PLAIN_FLOPS = 2e-4, 5e9  # that estimate: seconds of overhead a step, and arithmetic a second
TRIAL_STEPS = 4


def pick(engine: str, run: Run) -> tuple[Any, str]:
    """A cohort for this run, and one sentence that says which and why."""
    resumed = engine == "auto" and bool(run.rows)
    if engine == "auto":  # a resumed run keeps its engine, to end bit-equal
        engine = run.engine if resumed else os.environ.get("MIMICFL_ENGINE", "auto")
    plain = PlainCohort(run.template, run.clients, run.local, run.loss)
    if engine == "plain":
        return plain, "engine plain"
    if engine == "auto" and run.device.type != "cpu":
        return plain, f"engine plain on {run.device.type}"
    if engine == "auto" and (seconds := estimate(run)) < WORTH_IT:
        return plain, f"engine plain: about {seconds:.1f} s of work, too little to compile for"
    try:
        from .native.cohort import NativeCohort

        native = NativeCohort(run.template, run.clients, run.local, run.loss)
    except Unsupported as reason:
        if resumed:
            return plain, f"engine plain: {reason}; the run began on native, so it will end equal up to rounding only"
        if engine == "native":
            raise UsageError(f"the native engine cannot run this model: {reason}; use engine auto or plain") from None
        return plain, f"engine plain: {reason}"
    if engine == "native":
        return native, "engine native"
    took = [measured(cohort, run) for cohort in (plain, native)]
    ratio = took[0] / took[1]
    if ratio < 1:
        return plain, f"engine plain: measured {1 / ratio:.1f} times as fast as native here"
    return native, f"engine native: measured {ratio:.0f} times as fast as plain here"


def estimate(run: Run) -> float:
    """Seconds the plain cohort would take, very roughly, from the work alone: it must not depend on the moment."""
    steps = samples = 0
    for client, times in enumerate(run.available[run.t :].sum(axis=0).tolist()):
        sizes = run.local.batch_sizes(int(run.clients.sizes[client])) if times else []
        steps += times * len(sizes)
        samples += times * sum(sizes)
    return steps * PLAIN_STEP + samples * 6 * run.work.w.numel() / PLAIN_FLOPS


def measured(cohort: Any, run: Run) -> float:
    """The better of two trials; one is enough where a step is so long that noise does not matter."""
    first = trial(cohort, run)
    return first if first > 0.5 else min(first, trial(cohort, run))


def trial(cohort: Any, run: Run) -> float:
    """Seconds for a few steps of the first client; nothing of it is kept."""
    own, cohort.local = cohort.local, dataclasses.replace(cohort.local, epochs=None, steps=TRIAL_STEPS)
    ask = Ask(0, run.seed, run.state.w, run.buffers, np.array([0]), Task(), 1e-6, 1e-6)
    start = time.perf_counter()
    cohort.train(ask)
    cohort.local = own
    return time.perf_counter() - start
