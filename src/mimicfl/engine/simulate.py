"""`simulate`: the round loop of the paper."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..algorithms import ALGORITHMS
from ..availability import PATTERNS
from ..data.dataset import Data
from ..errors import Diverged, one_of
from ..local.losses import LOSSES
from ..local.lr import RATES
from ..local.update import LocalSGD
from ..metrics.diagnostics import Watch, plan
from ..metrics.history import History, Row
from ..registry import describe
from ..theory.population import Population
from .pick import pick
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
    eval_every: int = 1,
    diagnose: Any = None,
    out: str | Path | None = None,
    checkpoint_every: int | None = None,
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
    engine            "auto" takes the fastest that fits; "plain", one client after another in PyTorch; "native", compiled
    eval_every        test after every so many rounds, and after the last
    diagnose          "every=10": at every tenth round the applied direction is set against the true gradient over all clients,
                      see `mimicfl.metrics.diagnostics`; None or "off" costs nothing
    out               a folder for rows, checkpoints and the result; called again with the same arguments, a stopped run
                      goes on where it was and ends bit-equal to one never stopped
    checkpoint_every  rounds between checkpoints; None spends at most 5 % of the time on them
    progress          called after each round with its row and the number of rounds
    notice            called once with a sentence: which engine was taken, and why
    """
    local = LocalSGD() if local is None else local
    what = {"rounds": rounds, "uploads": uploads, "global_lr": global_lr, "weighting": weighting}
    work = {"local": local, "update": update, "loss": loss, "seed": seed, "device": device, "eval_every": eval_every}
    run = Run(model=model, data=data, split=split, algorithm=algorithm, availability=availability, **what, **work)
    one_of("engine", engine, ["auto", "plain", "native"])
    watch(run, diagnose)
    run.config = config or _in_words(run, what)
    if engine == "native":
        pick(engine, run)  # an engine that was asked for and cannot run is refused before anything is written
    if out is not None:
        run.open(out, run.config, checkpoint_every)
    try:
        if run.t == run.rounds:
            return run.history()  # finished before
        cohort, why = pick(engine, run)
        run.use(cohort)
        if notice:
            notice(why)
        with exact():
            while run.t < run.rounds:
                ask = run.ask()  # w_t and the task go to S_t
                answers = cohort.train(ask) if ask else None  # LocalTrain(w_t) on every active client
                if ask and answers:
                    run.tell(ask, answers)  # g_i come back; v_t, c_i and w_{t+1} follow
                row = run.close_round(ask, answers)
                if progress:
                    progress(row, run.rounds)
            return run.history()
    except Diverged as error:
        raise Diverged(f"{error}: lower the learning rate{_kept(run)}") from None
    finally:
        if run.folder is not None:
            run.folder.close()


def watch(run: Run, diagnose: Any) -> None:
    """Let the run be looked at from the side."""
    wanted = plan(diagnose)
    if wanted is None:
        return
    kind = next((name for name in LOSSES if LOSSES.find(name) is run.loss), "")
    population = Population(run.template, run.clients, run.loss, run.share)
    low = 0.0 if kind else None  # the built-in losses are never negative
    if run.optimum is not None:
        values, g = population.gradients(run.optimum)
        if float(population.mean(g).norm()) <= 1e-5 * float(g.norm(dim=1).max()):  # other splits or weights have another minimum
            low = float(population.share @ values)
    batches = [run.local.batch_sizes(int(size))[0] for size in run.clients.sizes]
    run.watch = Watch(wanted, population, run.available, batches, kind, low, run.seed)


def _kept(run: Run) -> str:
    if run.folder is None:
        return ""
    saved = run.folder.load("checkpoint")
    return f"; the last good checkpoint, of round {int(saved[1]['round'])}, is kept in {run.folder.path}" if saved else ""


@contextmanager
def exact() -> Iterator[None]:
    """Convolutions on a GPU in full float32 and in one fixed order: the same run gives the same bits."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


def _in_words(run: Run, given: dict[str, Any]) -> dict[str, Any]:
    """What can be said in words of a run made of Python objects."""
    follows = isinstance(given["global_lr"], str) and given["global_lr"] == "local"
    return {
        "source": "python",
        "dataset": run.data.name,
        "model": type(run.template).__name__.lower(),
        "num_clients": len(run.split),
        "algorithm": describe(ALGORITHMS, run.algorithm),
        "availability": describe(PATTERNS, run.pattern),
        "rounds": given["rounds"],
        "uploads": given["uploads"],
        "epochs": run.local.epochs,
        "steps": run.local.steps,
        "batch_size": run.local.batch_size or "full",
        "lr": describe(RATES, run.local_lr),
        "global_lr": "local" if follows else describe(RATES, run.global_lr),
        "update": run.update,
        "weighting": given["weighting"],
        "loss": getattr(run.loss, "__name__", type(run.loss).__name__),
        "eval_every": run.eval_every,
        "seed": run.seed,
    }
