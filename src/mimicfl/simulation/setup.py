"""From settings to a run before its first round: the server, the schedule, and the checks that need both."""

from typing import Any

import numpy as np

from ..algorithms import make as make_algorithm
from ..algorithms import server_optimizers, trait
from ..algorithms.client_memory import Budget
from ..algorithms.server import Server
from ..clients.lr import schedule as rate_schedule
from ..errors import integer
from ..participation.rates import EstimatedRates, known_rates
from ..participation.run_schedule import Participation, participation
from ..participation.settings import ParticipationSettings
from ..participation.stages import Stages
from ..problem import Problem
from ..settings import check
from .checks import check_learning_rates, check_units
from .run import Run
from .traffic import client_seconds


def set_up(
    problem: Problem,
    *,
    algorithm: Any,
    availability: Any,
    rounds: int | None,
    uploads: int | None,
    global_lr: Any,
    update: str,
    seed: int,
    eval_every: int,
    server_optimizer: Any = "none",
    average: float = 0.0,
    select: Any = "all",
    deadline: float = 0.0,
    speed: Any = "none",
    bandwidth: Any = "none",
    asynchronous: int = 0,
    concurrency: int = 0,
    participation_rates: str = "known",
    state_budget: str = "auto",
    checkpoint_every: int | None = None,
) -> Run:
    """Arguments as in `simulate`."""
    seed, eval_every, update = check("seed", seed), check("eval_every", eval_every), check("update", update)
    numbers = (check("asynchronous", asynchronous), check("concurrency", concurrency))
    waits, rates = check("deadline", deadline), check("participation_rates", participation_rates)
    asked = ParticipationSettings.of(availability, select, waits, speed, bandwidth, *numbers, rates)
    mean = check("average", average)
    server = _server(problem, make_algorithm(algorithm), global_lr, update, server_optimizer, asked.pattern.warm_start, mean)
    found = _participation(problem, server, asked, seed, rounds, uploads)
    check_learning_rates(problem, found.active, server, not asked.selection.needs_model, asked.buffered is not None)
    check_units(problem, server)
    server.limit_memory(Budget.parse(state_budget))
    run = Run(problem, server, asked, found, seed, eval_every, checkpoint_every)
    if trait(server.algorithm, "needs_participation_rates"):
        _give_rates(run)
    return run


def _server(problem: Problem, algorithm: Any, global_lr: Any, update: str, optimizer: Any, warm_start: bool, average: float) -> Server:
    for name in ("uploads", "downloads"):
        integer(f"the algorithm's {name}", trait(algorithm, name))
    local_lr = rate_schedule(problem.local.lr)
    follows = isinstance(global_lr, str) and global_lr == "local"
    return Server(
        algorithm,
        problem.work.w.clone(),
        problem.work.buffers(),
        problem.share,
        local_lr=local_lr,
        global_lr=local_lr if follows else rate_schedule(global_lr),
        update=update,
        steps_to_K=problem.local.worth,
        optimizer=server_optimizers.make(optimizer),
        warm_start=warm_start,
        average=average,
    )


def _participation(
    problem: Problem, server: Server, asked: ParticipationSettings, seed: int, rounds: int | None, uploads: int | None
) -> Participation:
    seconds = client_seconds(problem, server, seed, asked.speed, asked.bandwidth)
    sizes = problem.clients.sizes.view()
    sizes.flags.writeable = False  # a custom selection must not change how clients train, in this run or in others of the same problem
    stages = Stages(asked.selection, seconds, asked.deadline, sizes, seed, asked.pattern.round_seconds)
    cost = trait(server.algorithm, "uploads")
    return participation(asked.pattern, stages, len(problem.split), seed, problem.class_counts, rounds, uploads, cost, asked.buffered)


def _give_rates(run: Run) -> None:
    """Tell the server how often clients participate."""
    asked, n = run.asked, len(run.problem.split)
    if asked.rates == "known":
        stages, counts = run.participation.stages, run.problem.class_counts
        known = known_rates(asked.pattern, stages, n, run.seed, counts, asynchronous=asked.buffered is not None)
        run.server.participation_rates = lambda active: np.asarray(known[active])
    else:
        estimate = EstimatedRates(n, forced=int(asked.pattern.warm_start))
        run.server.participation_rates = lambda active: estimate.update(run.recorder.rows, active)
