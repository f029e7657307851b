"""A run's batches, units and learning rates, checked before its first round."""

import warnings

import numpy as np
import torch
from torch import nn

from ..algorithms import trait
from ..algorithms.server import Server
from ..clients.lr import check_certificate, theory
from ..data.samples import forward
from ..errors import UsageError
from ..participation.run_schedule import Participation
from ..problem import Problem
from ..text import counted
from ..theory.rounds import Rounds

MOSTLY = 0.5  # of the rounds


def check_participation(schedule: Participation, limited: bool) -> None:
    """Refuse a run in which no client ever trains; warn if most rounds train nothing. `limited`: the run has a fixed number of rounds."""
    stages, seconds = schedule.stages, schedule.stages.round_seconds
    active = schedule.available if stages.selection.needs_model else schedule.active
    timed = "" if seconds is None else f" of {seconds:g} s"
    what = counted(len(active), "round") + timed + ("" if seconds is None else f" ({seconds * len(active):,.15g} s in all)")
    if not schedule.available.any():
        remedy = "another availability" if seconds is None else "a longer round (round=SECONDS), another offset"
        raise UsageError(f"no client is available in {what}, so nothing would be trained; choose {remedy} or more rounds")
    if not active.any():
        raise UsageError(f"no available client is selected and finishes in {what}; change the selection, the deadline or the rounds")
    empty = 1 - float(active.any(axis=1).mean())
    if limited and empty > MOSTLY:  # in tens of percent, so that the seeds of a comparison warn once; some round trains
        warnings.warn(
            f"about {min(90, 10 * round(10 * empty))} % of the rounds{timed} have no active client and train nothing; "
            "mimicfl availability show draws the schedule, and a number of uploads instead of rounds does not count such rounds",
            stacklevel=2,
        )


def check_single_samples(problem: Problem, available: np.ndarray) -> None:
    """Try a batch of one sample in training, if a client that is ever available has one: BatchNorm needs several values per channel."""
    local, work, clients = problem.local, problem.workspace, problem.clients
    if local.loop is not None or not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in work.module.modules()):
        return
    alone = (c for c in np.flatnonzero(available.any(axis=0)).tolist() if 1 in local.batch_sizes(int(clients.sizes[c]), c))
    if (client := next(alone, None)) is None:
        return
    before = work.buffers()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[problem.device] if problem.device.type == "cuda" else []):
            forward(work.module.train(), clients.inputs(torch.from_numpy(clients.split[client][:1]).to(problem.device)))
    except Exception as error:
        size = f"{counted(int(clients.sizes[client]), 'sample')} and batch_size={local.batch_size}"
        raise UsageError(
            f"the model's BatchNorm cannot train on a batch of one sample, which client {client} has with {size}; choose another "
            "batch_size or split, or GroupNorm"
        ) from error
    finally:
        work.load(work.w.clone(), before)


def check_units(problem: Problem, server: Server) -> None:
    """Warn if an algorithm that needs gradients receives steps in another unit, which it would treat as gradients."""
    other = [name for name in problem.local.extras if name in ("optimizer", "lr_multipliers", "loop")]
    if other and trait(server.algorithm, "needs_steps"):
        name, given = type(server.algorithm).__name__, getattr(problem.local, "optimizer", None)
        named = given if isinstance(given, str) else getattr(given, "__name__", "this optimizer")
        words = [{"optimizer": str(named), "loop": "a custom loop"}.get(each, each) for each in other]
        warnings.warn(
            f"{name} treats the clients' mean steps as mean gradients, which they are not with {' and '.join(words)}; use SGD with it",
            stacklevel=2,
        )


def check_learning_rates(problem: Problem, active: np.ndarray, server: Server, known: bool = True, asynchronous: bool = False) -> None:
    """Find a rate of zero or less now, not after an hour; check that a certified rate fits the run.

    `known`: the schedule does not depend on the model.
    """
    local, local_lr, global_lr = problem.local, server.local_lr, server.global_lr
    for t, m in enumerate(active.sum(axis=1).tolist()):
        if m:
            local_lr(t, m), global_lr(t, m)  # custom functions are checked wherever they are called
    if isinstance(global_lr, theory) and global_lr.horizon is not None and active.any():
        if not known:
            raise UsageError("a certified learning rate needs a schedule that is known before the run; use another selection or global_lr")
        if asynchronous:
            raise UsageError("a certified learning rate needs synchronous training; remove asynchronous, or use another global_lr")
        if local.extras:
            without = " and ".join(local.extras)
            raise UsageError(f"a certified learning rate requires plain SGD: remove {without}, or use another global_lr")
        if server.optimizer is not None:
            raise UsageError("a certified learning rate needs the algorithm's own step: use server_optimizer='none' or another global_lr")
        rounds = Rounds(np.ones(len(active)), active)
        steps = max(len(local.batch_sizes(int(size), client)) for client, size in enumerate(problem.clients.sizes))
        largest = max(local_lr(int(t), int(m)) for t, m in zip(rounds.number, rounds.m, strict=True))
        check_certificate(global_lr, rounds, steps, largest, server.update)
