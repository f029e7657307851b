"""The round loop: Algorithm 1 of the paper, for one run or for many runs whose clients train together."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ..algorithms.client_numbers import all_on_device
from ..algorithms.finite import check_updates, finite_rows, good_clients, raise_for_model
from ..algorithms.updates import ClientUpdates
from ..clients.params import Workspace
from ..data.clients import Holdout
from ..engines.interface import Engine, TrainRequest, train_clients
from ..engines.provisional import next_engine
from ..engines.torch_settings import exact, own_threads
from ..errors import Diverged
from ..files import is_scratch
from ..metrics.evaluate import Tally, scores
from ..metrics.history import History
from ..metrics.rows import Row
from ..tasks import LearningTask
from .run import Run

OnRow = Callable[[Run, Row], None]
Requests = dict[Run, TrainRequest | None]
Updates = dict[Run, ClientUpdates]
Buffers = list[dict[str, Tensor]]
Ends = dict[Run, History | Diverged]


def round_loop(runs: Sequence[Run], engine: Engine, on_row: OnRow | None = None, until: float | None = None) -> Ends:
    """Train every run to its end, round by round; a run that ends or diverges does not affect the others.

    At `until`, a time of `time.monotonic`, the runs that are not finished are saved and left out.
    """
    ends: Ends = {}
    with exact(runs[0].problem.precision), own_threads() as usual:
        while live := [run for run in runs if run not in ends]:
            engine = next_engine(engine, live)
            torch.set_num_threads(runs[0].threads or usual)
            requests = requests_of(fitting(live, engine.room))  # w_t and the instructions for S_t
            updates = train_active(engine, requests)  # LocalTrain(w_t) on every active client
            apply_updates(requests, updates, ends)  # v_t, c_i and w_{t+1}
            close_rounds(requests, updates, ends, engine, len(live), on_row)
            if until is not None and time.monotonic() >= until:
                for run in (run for run in live if run not in ends):
                    run.checkpoint()
                break
    return ends


def requests_of(runs: Sequence[Run]) -> Requests:
    """The requests to the active clients of these runs, whose numbers are copied to the device at once."""
    active = [run.begin_round() for run in runs]
    return {run: run.request(numbers) for run, numbers in zip(runs, all_on_device(active, runs[0].problem.device), strict=True)}


def train_active(engine: Engine, requests: Requests) -> Updates:
    """The updates of all active clients of these runs."""
    busy = {run: request for run, request in requests.items() if request is not None}
    updates = train_clients(engine, list(busy.values())) if busy else []
    for run in busy:
        run.engine = engine.label  # an engine may reduce its lanes for lack of memory
    return dict(zip(busy, updates, strict=True))


def apply_updates(requests: Requests, updates: Updates, ends: Ends) -> None:
    """The server steps of all runs. Whether updates and models are finite is found for all of them at once."""
    trained = {run: request for run, request in requests.items() if request is not None}
    for (run, request), good in zip(trained.items(), good_clients([updates[run] for run in trained]), strict=True):
        with diverging(run, ends):
            check_updates(request, good)
            run.apply(request, updates[run])
    moved = [run for run in trained if run not in ends]
    for run, good in zip(moved, finite_rows([run.server.w[None] for run in moved]), strict=True):
        with diverging(run, ends):
            if not good.all():
                raise_for_model(trained[run])


def close_rounds(requests: Requests, updates: Updates, ends: Ends, engine: Engine, num_runs: int, on_row: OnRow | None) -> None:
    """Evaluate and record the round of every run that has not diverged, and finish the runs for which it was the last."""
    losses = mean_losses(updates)
    left = [run for run in requests if run not in ends]
    evaluate_models([run for run in left if run.due and run.score is None], engine)
    for run in left:
        with diverging(run, ends):
            row = run.close_round(requests[run], losses.get(run), num_runs)
            if on_row:
                on_row(run, row)
            if run.t == run.rounds:
                ends[run] = run.history()


def mean_losses(updates: Updates) -> dict[Run, float]:
    """The mean training loss of each run's clients, read from the device at once."""
    if not updates:
        return {}
    losses = torch.cat([found.loss for found in updates.values()]).cpu().split([len(found.loss) for found in updates.values()])
    return {run: float(own.mean()) for run, own in zip(updates, losses, strict=True)}


def fitting(live: Sequence[Run], room: int | None) -> list[Run]:
    """The runs to advance by a round: all of them, or those whose clients fill the engine's lanes best.

    Runs do not wait for each other. If all always advanced together, the last turn of every round would be mostly empty lanes.
    """
    jobs = {run: int(run.participation.active_per_round[run.t]) for run in live}
    total = sum(jobs.values())
    if room is None or total <= room:
        return list(live)
    order = sorted(live, key=lambda run: run.t - run.rounds)  # those with most rounds left first, so that all end together
    best, fullest = list(live), total / (-(-total // room) * room)
    for turns in range(total // room, 0, -1):
        chosen, free = [], turns * room
        for run in order:
            if jobs[run] <= free:
                chosen.append(run)
                free -= jobs[run]
        if chosen and 1 - free / (turns * room) > fullest:
            best, fullest = chosen, 1 - free / (turns * room)
    return best


def evaluate_models(due: list[Run], engine: Engine) -> None:
    """Evaluate the models of these runs in one pass, if the engine can; otherwise each run does it on its own."""
    if not due:
        return None
    problem, models = due[0].problem, [run.server.model for run in due]
    w, buffers = torch.stack([w for w, _ in models]), [own for _, own in models]
    if isinstance(problem.loss, LearningTask):
        return evaluate_in_slices(problem.loss, problem.test, due, engine, w, buffers)
    outputs = engine.outputs(w, buffers, problem.test)
    if outputs is not None:
        for run, found in zip(due, scores(outputs, problem.test.y, problem.loss, problem.data.num_classes), strict=True):
            run.score = found
    return None


def evaluate_in_slices(task: LearningTask, test: Holdout, due: list[Run], engine: Engine, w: Tensor, buffers: Buffers) -> None:
    """`evaluate_models` for a task, on one slice of the test samples at a time."""
    tallies = [Tally(task) for _ in due]
    for part in test.slices():
        outputs = engine.outputs(w, buffers, part)
        if outputs is None:
            return
        for tally, found in zip(tallies, outputs, strict=True):
            tally.add(found, part.y)
    for run, tally in zip(due, tallies, strict=True):
        run.score = tally.score()


@contextmanager
def diverging(run: Run, ends: Ends) -> Iterator[None]:
    """A run that diverges in this block ends there, with a message that says what to do."""
    try:
        yield
    except Diverged as error:
        kept = "" if run.checkpoints is None or is_scratch() else run.checkpoints.last_good()
        ends[run] = Diverged(f"{error}: {_advice(run, error)}{kept}")


def _advice(run: Run, error: Diverged) -> str:
    """What to do about a run that diverged: a loss that is not finite with the initial model has another cause than the rate."""
    rate = "lower the learning rate" + (" or the weight decay" if run.problem.local.weight_decay else "")
    if error.client is None or isinstance(run.problem.loss, LearningTask):
        return rate
    initial = Workspace(run.problem.template, run.problem.device)
    loss = run.problem.client_losses(initial.w, initial.buffers(), np.array([error.client]))[0]
    if np.isfinite(loss):
        return rate
    return f"the loss on this client's samples is {loss:g} with the initial model; check the samples, the model and the loss"
