"""From settings to a run before its first round: the server, the schedule, and the checks that need both."""

from collections.abc import Mapping
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
from ..settings import arguments_of
from .checks import check_learning_rates, check_participation, check_single_samples, check_units
from .run import Run
from .traffic import client_seconds


def set_up(problem: Problem, given: Mapping[str, Any]) -> Run:
    """The run of a problem with these settings; each function below receives those that it has parameters for."""
    chosen = ParticipationSettings.of(**arguments_of(ParticipationSettings.of, given))
    server = make_server(problem, chosen, **arguments_of(make_server, given))
    schedule = make_participation(problem, server, chosen, **arguments_of(make_participation, given))
    check_participation(schedule, limited=given.get("uploads") is None)
    check_learning_rates(problem, schedule.active, server, not chosen.selection.needs_model, chosen.buffered is not None)
    check_units(problem, server)
    check_single_samples(problem, schedule.available)
    run = Run(problem, server, chosen, schedule, **arguments_of(Run, given))
    if trait(server.algorithm, "needs_participation_rates"):
        _give_rates(run)
    if run.versions is not None:  # before a folder is made
        run.versions.check(run.server.request(0, np.array([0])))
    return run


def make_server(
    problem: Problem,
    chosen: ParticipationSettings,
    algorithm: Any,
    global_lr: Any,
    update: str,
    server_optimizer: Any,
    average: float,
    state_budget: str,
) -> Server:
    """The server with the initial model."""
    algorithm = make_algorithm(algorithm)
    for name in ("uploads", "downloads"):
        integer(f"the algorithm's {name}", trait(algorithm, name))
    local_lr = rate_schedule(problem.local.lr)
    follows = isinstance(global_lr, str) and global_lr == "local"
    server = Server(
        algorithm,
        problem.workspace.w.clone(),
        problem.workspace.buffers(),
        problem.share,
        local_lr=local_lr,
        global_lr=local_lr if follows else rate_schedule(global_lr),
        update=update,
        steps_to_K=problem.local.worth,
        optimizer=server_optimizers.make(server_optimizer),
        warm_start=chosen.pattern.warm_start,
        average=average,
    )
    server.limit_memory(Budget.parse(state_budget))
    return server


def make_participation(
    problem: Problem, server: Server, chosen: ParticipationSettings, seed: int, rounds: int | None, uploads: int | None
) -> Participation:
    """Which clients are active in which round."""
    seconds = client_seconds(problem, server, seed, chosen.speed, chosen.bandwidth)
    sizes = problem.clients.sizes.view()
    sizes.flags.writeable = False  # a custom selection must not change how clients train, in this run or in others of the same problem
    stages = Stages(chosen.selection, seconds, chosen.deadline, sizes, seed, chosen.pattern.round_seconds)
    cost = trait(server.algorithm, "uploads")
    return participation(chosen.pattern, stages, len(problem.split), seed, problem.class_counts, rounds, uploads, cost, chosen.buffered)


def _give_rates(run: Run) -> None:
    """Tell the server how often clients participate."""
    chosen, n = run.participation_settings, len(run.problem.split)
    if chosen.rates == "known":
        stages, counts = run.participation.stages, run.problem.class_counts
        known = known_rates(chosen.pattern, stages, n, run.seed, counts, asynchronous=chosen.buffered is not None)
        run.server.participation_rates = lambda active: np.asarray(known[active])
    else:
        estimate = EstimatedRates(n, forced=int(chosen.pattern.warm_start))
        run.server.participation_rates = lambda active: estimate.update(run.recorder.rows, active)
