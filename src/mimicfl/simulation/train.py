"""Train runs: every way to start one (`simulate`, `run`, `compare`, `sweep`, `reproduce`) ends here."""

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path

from ..engines.cluster.connect import check_address
from ..engines.cluster.engine import RayEngine
from ..engines.select import select_engine
from ..errors import Diverged
from ..metrics.history import History
from .round_loop import OnRow, round_loop
from .run import Run


def train(
    runs: Sequence[Run],
    folders: Sequence[str | Path | None],
    engine: str,
    notice: Callable[[str], None] | None = None,
    on_row: OnRow | None = None,
    until: float | None = None,
    ray: str = "",
) -> list[History | Diverged | None]:
    """Train runs that share model, data and loss, each in its folder; an interrupted run resumes there.

    With `ray`, the address of a cluster, its workers train the clients. Returns the history of each run, its error if it diverged, or
    None if `until`, a time of `time.monotonic`, came first.
    """
    if ray:
        check_address(ray)  # before anything is written
    opened: list[Run] = []
    try:
        for run, folder in zip(runs, folders, strict=True):
            if folder is not None:
                run.open(folder)
            opened.append(run)
        unfinished = [run for run in runs if run.t < run.rounds]
        ends: dict[Run, History | Diverged] = {run: run.history() for run in runs if run not in unfinished}
        for run in unfinished:
            _ = run.fingerprint  # as of now: a user's objects may change while they are used
        if unfinished:
            chosen, why = select_engine(engine, unfinished, notice, ray)
            with closing(chosen) if isinstance(chosen, RayEngine) else nullcontext():
                if notice:
                    notice(why)
                for run in unfinished:
                    run.engine = chosen.label
                    run.begin_callbacks()
                ends |= round_loop(unfinished, chosen, on_row, until)
        return [ends.get(run) for run in runs]
    finally:
        for run in opened:
            run.callbacks.end(finished=run.t == run.rounds)
            run.recorder.close()
