"""`simulate`: one run from Python objects; and runs that train together."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..algorithms import ALGORITHMS
from ..availability import PATTERNS
from ..config import CAME_LATER
from ..data.dataset import Data
from ..errors import Diverged, check_callable, whole
from ..local.lr import RATES
from ..local.update import LocalSGD
from ..metrics.history import History, Row
from ..registry import describe
from . import watching
from .drive import Watch, drive
from .moment import EachRound
from .pick import check_engine, pick
from .run import Run

Progress = Callable[[Row, int], None]


def simulate(
    model: nn.Module,
    data: Data,
    split: Any,
    algorithm: Any = "mimic",
    availability: Any = "always",
    rounds: int | None = None,
    *,
    uploads: int | None = None,
    local: LocalSGD | None = None,
    global_lr: Any = "local",
    update: str = "sum",
    weighting: str = "uniform",
    loss: Any = None,
    seed: int = 0,
    device: str = "cpu",
    engine: str = "auto",
    precision: str = "fp32",
    state_budget: str = "auto",
    eval_every: int = 1,
    diagnose: Any = None,
    out: str | Path | None = None,
    checkpoint_every: int | None = None,
    each_round: EachRound | None = None,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
    config: dict[str, Any] | None = None,
) -> History:
    """Train `model` federatedly, starting from the parameters it has; the model itself is left as it is.

    split             one array of training sample numbers per client
    algorithm         a name (`mimic`, `fedprox:mu=0.1`) or an object (`mf.MimiC()`)
    availability      a text (`time-varying:0.1`) or a pattern (`mf.availability.TimeVarying(0.1)`)
    rounds, uploads   stop after so many rounds, or model uploadings (SCAFFOLD uses 2 a round); the first that is reached
    local             what a client does in a round, see `LocalSGD`
    global_lr         eta_t: a rate, a schedule, or "local" to follow the local rate
    update            "sum" of the local gradients (model averaging), or their "mean" (the paper's formula)
    weighting         "uniform" (the paper) or by "samples"
    loss              a name or a function of (output, target); None takes the data's own
    engine            "auto" takes the fastest that fits, by trying; "plain" is one client after another in PyTorch; "native" (compiled)
                      and "workers" (a process a core) are for CPUs, "batched" (clients stacked) and "streams" (one CUDA stream
                      a client) for GPUs
    precision         of products on a GPU: "fp32", "tf32" or "bf16"
    state_budget      GiB for per-client state, "auto", "4" or "4,16" (on the device, in host memory); the rest goes to a file
    eval_every        test after every so many rounds, and after the last
    diagnose          "every=10": at every tenth round the applied direction is set against the true gradient over all clients,
                      see `mimicfl.metrics.diagnostics`; None or "off" costs nothing
    out               a folder for rows, checkpoints and the result; called again with the same arguments, a stopped run
                      goes on where it was and ends bit-equal to one never stopped
    checkpoint_every  rounds between checkpoints; None spends at most 5 % of the time on them
    each_round        called after each round with a `Moment`: its row, `params`, `model()` and `stop()`; a dict that it returns joins the
                      row, on disk as well
    progress          called after each round with its row and the number of rounds
    notice            called once with a sentence: which engine was taken, and why
    config            settings to keep in the folder instead of a description of these arguments
    """
    for name, function in (("each_round", each_round), ("progress", progress), ("notice", notice)):
        check_callable(name, function)
    if checkpoint_every is not None:
        whole("checkpoint_every", checkpoint_every)
    local = LocalSGD() if local is None else local
    what = {"rounds": rounds, "uploads": uploads, "global_lr": global_lr, "weighting": weighting}
    work = {"local": local, "update": update, "loss": loss, "seed": seed, "device": device, "eval_every": eval_every}
    how: dict[str, Any] = {"precision": precision, "state_budget": state_budget}
    run = Run(model=model, data=data, split=split, algorithm=algorithm, availability=availability, **what, **work, **how)
    check_engine(engine, run.device)  # before anything is written
    watching.watch(run, diagnose)
    run.each_round = each_round
    run.config = config or _in_words(run, what)
    if out is not None:
        run.open(out, run.config, checkpoint_every)
    try:
        found = together([run], engine, notice, None if progress is None else lambda run, row: progress(row, run.rounds))[0]
        if isinstance(found, Diverged):
            raise found
        assert found is not None  # without a deadline every run ends
        return found
    finally:
        run.close()


def together(
    runs: Sequence[Run],
    engine: str,
    notice: Callable[[str], None] | None = None,
    watch: Watch | None = None,
    deadline: float | None = None,
) -> list[History | Diverged | None]:
    """The histories of runs that share model, data and loss, trained as one; of a run that diverged, the error instead; of one that
    the deadline stopped, nothing."""
    waiting = [run for run in runs if run.t < run.rounds]
    ends: dict[Run, History | Diverged] = {run: run.history() for run in runs if run not in waiting}
    for run in waiting:
        _ = run.fingerprint  # as of now: objects of the user's may change while they are used
    if waiting:
        cohort, why = pick(engine, waiting, notice)
        if notice:
            notice(why)
        for run in waiting:
            run.engine = cohort.label
        ends |= drive(waiting, cohort, watch, deadline)
    return [ends.get(run) for run in runs]


def _in_words(run: Run, given: dict[str, Any]) -> dict[str, Any]:
    """What can be said in words of a run made of Python objects."""
    follows = isinstance(given["global_lr"], str) and given["global_lr"] == "local"
    return {
        "source": "python",
        "dataset": run.data.name,
        "model": f"{type(run.template).__name__.lower()} with {run.work.w.numel():,} parameters",
        "partition": run.partition or "custom",
        "num_clients": len(run.split),
        "algorithm": describe(ALGORITHMS, run.algorithm),
        "availability": describe(PATTERNS, run.pattern),
        "rounds": given["rounds"],
        "uploads": given["uploads"],
        **{"epochs": run.local.epochs, "steps": run.local.steps, **{name: list(each) for name, each in run.local.lists.items()}},
        "batch_size": run.local.batch_size or "full",
        **{key: value for key in CAME_LATER if (value := getattr(run.local, key))},
        "lr": describe(RATES, run.local_lr),
        "global_lr": "local" if follows else describe(RATES, run.global_lr),
        "update": run.update,
        "weighting": given["weighting"],
        "loss": getattr(run.loss, "__name__", type(run.loss).__name__),
        "eval_every": run.eval_every,
        "seed": run.seed,
    }
