"""The round loop of the paper, for one run or for many that train their clients together."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..errors import Diverged
from ..metrics.evaluate import scores
from ..metrics.history import History, Row
from .cohort import Cohort
from .provisional import settled
from .run import Run

Watch = Callable[[Run, Row], None]


def drive(runs: Sequence[Run], cohort: Cohort, watch: Watch | None = None, deadline: float | None = None) -> dict[Run, History | Diverged]:
    """Every run to its end, round by round; a run that is through, or that diverged, leaves the others alone.

    After the deadline (of `time.monotonic`) what is not through is saved and left out.
    """
    failed: dict[Run, Diverged] = {}
    ends: dict[Run, History] = {}
    with exact(runs[0].precision), own_threads() as usual:
        while live := [run for run in runs if run not in ends and run not in failed]:
            cohort = settled(cohort, live)
            torch.set_num_threads(runs[0].threads or usual)
            now = fitting(live, cohort.room)
            asked = [(run, run.ask()) for run in now]  # w_t and the task go to S_t
            busy = [(run, ask) for run, ask in asked if ask is not None]
            trained = cohort.train([ask for _, ask in busy]) if busy else []  # LocalTrain(w_t) on every active client
            answers = dict(zip([run for run, _ in busy], trained, strict=True))
            for run, _ in busy:
                run.engine = cohort.label  # lanes may have become fewer, for want of memory
            for run, ask in busy:
                with _noted(failed, run):
                    run.tell(ask, answers[run])  # g_i come back; v_t, c_i and w_{t+1} follow
            _test([run for run in now if run.due and run.score is None and run not in failed], cohort)
            for run, sent in asked:
                if run in failed:
                    continue
                with _noted(failed, run):
                    if run.keeper is not None:
                        run.keeper.company = len(live)
                    row = run.close_round(sent, answers.get(run))
                    if watch:
                        watch(run, row)
                    if run.t == run.rounds:
                        ends[run] = run.history()
            if deadline is not None and time.monotonic() >= deadline:
                _save([run for run in live if run not in ends and run not in failed])
                break
    return {**ends, **failed}


def _save(runs: Sequence[Run]) -> None:
    for run in runs:
        if run.keeper is not None:
            run.keeper.checkpoint()


def fitting(live: Sequence[Run], room: int | None) -> list[Run]:
    """The runs to advance by a round: all of them, or those whose clients fill the cohort's lanes best.

    Runs do not wait for each other. If all always advanced together, the last turn of every round would be mostly empty lanes.
    """
    jobs = {run: int(run.available[run.t].sum()) for run in live}
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


def _test(due: list[Run], cohort: Cohort) -> None:
    """All models that are due, tested in one pass where the cohort can."""
    if not due:
        return
    first = due[0]
    outputs = cohort.outputs(torch.stack([run.state.w for run in due]), [run.buffers for run in due], first.test)
    if outputs is not None:
        for run, found in zip(due, scores(outputs, first.test.y, first.loss, first.data.num_classes), strict=True):
            run.score = found


@contextmanager
def _noted(failed: dict[Run, Diverged], run: Run) -> Iterator[None]:
    try:
        yield
    except Diverged as error:
        kept = "" if run.keeper is None else run.keeper.last_good()
        or_decay = " or the weight decay" if run.local.weight_decay else ""
        failed[run] = Diverged(f"{error}: lower the learning rate{or_decay}{kept}")


@contextmanager
def own_threads(count: int | None = None) -> Iterator[int]:
    """Restore the number of threads at the end of the block; yields the number before it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


@contextmanager
def exact(precision: str = "fp32") -> Iterator[None]:
    """Products on a GPU in the precision asked for, and convolutions in one fixed order: the same run gives the same bits."""
    fast = precision != "fp32"
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = fast
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=fast):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
