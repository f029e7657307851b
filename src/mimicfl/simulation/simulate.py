"""`simulate`: one run, from Python objects."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..algorithms import ALGORITHMS
from ..algorithms.server_optimizers import SERVER_OPTIMIZERS
from ..callbacks.interface import Callback, EachRound, callback_set, copied
from ..clients.local_sgd import LocalSGD
from ..clients.lr import RATES
from ..data.dataset import Data
from ..engines.select import check_engine
from ..errors import Diverged, check_callable, integer
from ..metrics.history import History
from ..metrics.rows import Row
from ..participation import PATTERNS
from ..participation.distributions import DISTRIBUTIONS
from ..participation.selection import SELECTIONS
from ..problem import Problem
from ..registry import describe
from ..settings import SETTINGS, check
from ..tasks import LearningTask
from .diagnose import attach_diagnostics
from .run import Run
from .setup import set_up
from .train import train

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
    server_optimizer: Any = "none",
    average: float = 0.0,
    update: str = "sum",
    weighting: str = "uniform",
    loss: Any = None,
    task: Any = None,
    metrics: Any = None,
    test_split: Any = None,
    seed: int = 0,
    device: str = "cpu",
    engine: str = "auto",
    ray: str = "",
    precision: str = "fp32",
    state_budget: str = "auto",
    eval_every: int = 1,
    select: Any = "all",
    deadline: float = 0.0,
    speed: Any = "none",
    bandwidth: Any = "none",
    asynchronous: int = 0,
    concurrency: int = 0,
    participation_rates: str = "known",
    diagnose: Any = None,
    out: str | Path | None = None,
    checkpoint_every: int | None = None,
    each_round: EachRound | None = None,
    callbacks: Sequence[Callback | EachRound] = (),
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
    config: dict[str, Any] | None = None,
) -> History:
    """Train a copy of `model` with federated learning, starting from its parameters.

    split             one array of training sample numbers per client
    algorithm         a name (`mimic`, `fedprox:mu=0.1`) or an object (`mf.MimiC()`)
    availability      a spec (`time-varying:0.1`) or a pattern (`mf.availability.TimeVarying(0.1)`)
    rounds, uploads   stop after this many rounds or model uploads (one per vector that a client sends), whichever comes first
    local             what a client does in a round, see `LocalSGD` and `Local`
    global_lr         eta_t: a rate, a schedule, or "local" to follow the local rate
    server_optimizer  how the server applies the algorithm's direction: "none" (w - eta_t v_t), "momentum:0.9", "adam:lr=0.01", "yogi",
                      "adagrad", or an object of `mf.server_optimizers`
    average           evaluate and return a running mean of the global models over about the last 1/average of the rounds (9 is a good
                      value); clients train as without it. 0: off
    update            "sum" of the local gradients (model averaging), or their "mean" (the paper's formula)
    weighting         "uniform" (the paper) or by "samples"
    loss              a name or a function of (output, target); None takes the data's own
    task              the learning task, instead of a loss: "classification", "token-prediction", "regression", "multi-label" or an
                      object of `mf.tasks`; it determines the loss, how outputs are interpreted, and the metrics
    metrics           of the task, as names or `mf.tasks.Metric` objects; None uses the task's default metrics
    test_split        one array of test sample numbers per client, its own test set; by default from the data's `test_ids`, if it has them.
                      Rows then hold the main metric over clients: mean, worst tenth, spread, and by participation so far
    engine            "auto" finds the fastest by trial; "plain" trains one client after another in PyTorch; "native" (compiled) and
                      "workers" (one process per core) are for CPUs, "batched" (clients stacked) and "streams" (one CUDA stream per
                      client) for GPUs
    ray               the address of a Ray cluster whose workers train the clients with that engine: "auto", "local" for the cores of this
                      machine, or as in `ray.init`; "" for none
    precision         of products on a GPU: "fp32", "tf32" or "bf16"
    state_budget      GiB for per-client state, "auto", "4" or "4,16" (on the device, in host memory); the rest goes to a file
    eval_every        rounds between evaluations; the last round is always evaluated
    select            which of the available clients are selected: "uniform:10", an object, or a function of `availability.Candidates`
    deadline          virtual seconds after which the server stops waiting; 0: it waits for all clients
    speed, bandwidth  samples per virtual second that clients train on, and Mbit per second, up and down: a number or a distribution such
                      as "lognormal:100,0.5"; rows then have `virtual_seconds`
    asynchronous      K: clients train at their own pace, and the server steps after every K arrivals; at most `concurrency` train at once
    participation_rates  for algorithms that need them: "known" from the pattern, or "estimated" during the run
    diagnose          "every=10": every tenth round, compare the applied direction with the true gradient over all clients,
                      see `mimicfl.metrics.diagnostics`; None or "off" costs nothing
    out               a folder for rows, checkpoints and the result; called again with the same arguments, an interrupted
                      run resumes and ends with the same bits
    checkpoint_every  rounds between checkpoints; None spends at most 5 % of the time on them
    each_round        called after each round with a `RoundInfo`: its row, `params`, `model()` and `stop()`; a dict that it returns is added
                      to the row, also on disk
    callbacks         a list of such functions and of objects of `mf.callbacks`: early stopping, the best model, trackers
    progress          called after each round with its row and the number of rounds, such as `mf.ProgressBar()`
    notice            called with one line of text: which engine was selected, and why
    config            settings to store in the folder instead of a description of these arguments
    """
    called = callback_set(each_round, callbacks)
    check_callable("progress", progress, such_as="mf.ProgressBar()")
    check_callable("notice", notice, such_as="print")
    checkpoint_every = 0 if checkpoint_every is None else integer("checkpoint_every", checkpoint_every)
    rounds, uploads = check("rounds", rounds), check("uploads", uploads)
    given = dict(locals())  # the settings, by name
    local = LocalSGD() if local is None else local
    problem = Problem.of(model, data, split, local, loss, weighting, device, precision, task, metrics, test_split)
    run = set_up(problem, given)
    check_engine(engine, problem.device)  # before anything is written
    attach_diagnostics(run, diagnose)
    run.callbacks = called
    run.config = config or described(run, given)
    on_row = None if progress is None else lambda run, row: progress(copied(row), run.rounds)
    [found] = train([run], [out], engine, notice, on_row, ray=ray)
    if isinstance(found, Diverged):
        raise found
    assert found is not None  # without a deadline every run ends
    return found


def described(run: Run, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run made from Python objects, as far as text can describe them."""
    follows = isinstance(given["global_lr"], str) and given["global_lr"] == "local"
    problem, server, local = run.problem, run.server, run.problem.local
    return {
        "source": "python",
        "dataset": problem.data.name,
        "model": f"{type(problem.template).__name__.lower()} with {problem.workspace.w.numel():,} parameters",
        "partition": problem.partition or "custom",
        "num_clients": len(problem.split),
        "algorithm": describe(ALGORITHMS, server.algorithm),
        "availability": describe(PATTERNS, run.participation_settings.pattern),
        "rounds": given["rounds"],
        "uploads": given["uploads"],
        **{"epochs": local.epochs, "steps": local.steps, **{name: list(each) for name, each in local.lists.items()}},
        "batch_size": local.batch_size or "full",
        **local.described,
        "lr": describe(RATES, server.local_lr),
        "global_lr": "local" if follows else describe(RATES, server.global_lr),
        **({} if server.optimizer is None else {"server_optimizer": describe(SERVER_OPTIMIZERS, server.optimizer)}),
        **({} if server.running_mean is None else {"average": server.running_mean.average}),
        "update": server.update,
        "weighting": problem.weighting,
        **described_loss(problem.loss),
        "eval_every": run.eval_every,
        "seed": run.seed,
        **_stages(run),
    }


def described_loss(loss: Any) -> dict[str, Any]:
    """The settings that describe a loss or a task."""
    if isinstance(loss, LearningTask):
        return {"task": loss.name, "metrics": ",".join(metric.name for metric in loss.metrics)}
    return {"loss": getattr(loss, "__name__", type(loss).__name__)}


def _stages(run: Run) -> dict[str, Any]:
    """Selection, deadline and clock, where they differ from the defaults."""
    chosen = run.participation_settings
    found = {"select": describe(SELECTIONS, chosen.selection), "deadline": chosen.deadline or 0.0, "participation_rates": chosen.rates}
    found |= {name: describe(DISTRIBUTIONS, d) for name in ("speed", "bandwidth") if (d := getattr(chosen, name)) is not None}
    if chosen.buffered is not None:
        found |= {"asynchronous": chosen.buffered.arrivals, "concurrency": chosen.buffered.concurrency}
    return {name: value for name, value in found.items() if value != SETTINGS[name].default}
