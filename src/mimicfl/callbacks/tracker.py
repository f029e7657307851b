"""Trackers: send the rows of a run to TensorBoard, Weights & Biases, MLflow or a CSV file.

A tracker never stops a run. If it cannot be reached, there is one notice for all runs of a comparison, and they continue without it; their
rows are in the run folders, and `send` (`mimicfl track send`) delivers what is missing. A resumed run continues the same run in the
tracker: rounds that the tracker already has are not sent again.
"""

import contextlib
import copy
import json
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError, first_line
from ..files import write_text
from ..metrics.history import read
from ..metrics.rows import Row
from ..metrics.store import RunFolder, find_runs
from ..registry import Registry
from .interface import Callback, RoundInfo, RunInfo

UNSENT = "unsent"  # key of the trackers that are missing rounds
STATE = ".tracking.json"  # in the run folder: the run's id in trackers, and the rounds sent to trackers that cannot be queried
FLUSH_EVERY = 1.0  # seconds between two messages to a tracker
RETRY_AFTER = 60.0  # seconds in which other runs of a comparison do not try a tracker that failed, since each attempt may take long

TRACKERS: Registry["Tracker"] = Registry("tracker")


class Tracker(Callback):
    """A destination of rows. Subclasses implement `connect`, `log` and `close`."""

    part_of_result = False
    _lost = _strict = False
    _failed: dict[Path | None, float]  # when it last failed, by the folder of a comparison; the copies for its runs share this

    def __new__(cls, *args: Any, **kwargs: Any) -> "Tracker":
        made = super().__new__(cls)
        made._failed = {}
        return made

    def connect(self, run: RunInfo, run_id: str) -> int:
        """Open the run in the tracker, the same one for the same id; returns how many rounds it has already."""
        raise NotImplementedError

    def log(self, rows: Sequence[Row]) -> None:
        """Send rows, in order."""
        raise NotImplementedError

    def close(self, finished: bool) -> None:
        """Called after the last row has been sent."""

    @property
    def spec(self) -> str:
        """How notices and the command line name this tracker."""
        return type(self).__name__

    def begin(self, run: RunInfo) -> None:
        self._run, self._pending, self._lost, self._flushed = run, list[Row](), False, time.monotonic()
        self._sent = self._first = 0
        if self._just_failed():
            return self._give_up()
        with self._tolerant():
            self._sent = self._first = self.connect(run, _run_id(run))
            self._send(list(run.rows)[self._sent :])
        return None

    def each_round(self, now: RoundInfo) -> None:
        if self._lost or now.row["round"] < self._sent:  # a resumed run repeats the rounds after its checkpoint, with the same values
            return
        self._pending.append(now.row)
        if self._just_failed():
            self._give_up()
        elif time.monotonic() - self._flushed >= FLUSH_EVERY:
            with self._tolerant():
                self._flush()

    def end(self, finished: bool) -> None:
        if self._lost:
            return
        with self._tolerant():
            self._flush()
            self.close(finished)
            if self.spec in (known := _unsent(self._run)):
                keep_state(self._run, {UNSENT: [spec for spec in known if spec != self.spec]})

    def _flush(self) -> None:
        rows, self._pending, self._flushed = self._pending, [], time.monotonic()
        self._send(rows)

    def _send(self, rows: Sequence[Row]) -> None:
        if rows:
            self.log(rows)
            self._sent = rows[-1]["round"] + 1

    def _tolerant(self) -> "_Tolerant":
        return _Tolerant(self)

    def _just_failed(self) -> bool:
        """Whether another run of the same comparison has just found that the tracker cannot be reached."""
        return bool(self._run.name) and time.monotonic() - self._failed.get(_root(self._run), -RETRY_AFTER) < RETRY_AFTER

    def _give_up(self) -> None:
        """Use the tracker no more in this run, and record in the run folder that it is missing rounds."""
        self._lost = True
        with contextlib.suppress(UsageError):  # a full disk must not stop the run either
            keep_state(self._run, {UNSENT: list({*_unsent(self._run), self.spec})})


class _Tolerant:
    """A tracker that raises is not used for the rest of the run; one notice says so."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):  # nothing happened, or Ctrl-C
            return False
        tracker = self.tracker
        tracker._give_up()
        said = f"{tracker.spec} cannot be reached ({_reason(error)})"
        if tracker._strict:
            raise UsageError(f"{said}; nothing is lost, try again later") from error
        tracker._failed[_root(tracker._run)] = time.monotonic()
        warnings.warn(f"{said}; training continues without it, and the rows can be sent later: {_later(tracker)}", stacklevel=2)
        return True


def _later(tracker: Tracker) -> str:
    """How to send the rows that a tracker is missing."""
    folder = _root(tracker._run)
    if folder is None:
        return "a run with out=FOLDER keeps its rows"
    if type(tracker).spec is Tracker.spec:  # the command line cannot name it
        return f"mf.callbacks.send({str(folder)!r}, {tracker.spec}(...))"
    return f"mimicfl track send {folder} --track {tracker.spec}"


def _root(run: RunInfo) -> Path | None:
    """The folder of the comparison that the run belongs to, or the run's own."""
    name = Path(run.name).parts
    within = run.folder is not None and name and run.folder.parts[-len(name) :] == name
    return run.folder.parents[len(name) - 1] if within and run.folder else run.folder


def _reason(error: BaseException) -> str:
    """The system's own words for a failed connection, where there are any: libraries wrap them in long messages."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return str(cause.strerror)
        cause = cause.__cause__ or cause.__context__
    return first_line(error)


def numbers(row: Row) -> dict[str, float]:
    """The numbers of a row: its own columns, and `class_accuracy/3` for lists."""
    found: dict[str, float] = {}
    for key, value in row.items():
        for name, each in (
            ((f"{key}/{k}", v) for k, v in enumerate(value)) if isinstance(value, list) and key != "clients" else ((key, value),)
        ):
            if isinstance(each, (int, float)) and not isinstance(each, bool) and name != "round":
                found[name] = float(each)
    return found


def title(run: RunInfo) -> str:
    """The run's title in the tracker."""
    if run.name or run.folder:
        return run.name or (run.folder.name if run.folder else "")
    return "-".join(str(run.config.get(key, "")) for key in ("algorithm", "dataset", "seed"))


def file_title(run: RunInfo, run_id: str) -> str:
    """The title with the run's id, for names of files: two comparisons may send runs with the same title to one place."""
    return f"{title(run)}-{run_id[:8]}"


def settings(run: RunInfo) -> dict[str, Any]:
    return {key: value for key, value in run.config.items() if value is not None}


def make(spec: str) -> Tracker:
    """A tracker from its spec: `tensorboard:DIR`, `wandb:PROJECT,offline=true`, `mlflow:URI`, `csv:DIR`."""
    return TRACKERS.make(spec)


class Sent(NamedTuple):
    """What `send` did: the runs at or below the folder, and how many rounds of them were new to the tracker."""

    runs: int
    rounds: int


def send(path: str | Path, tracker: Tracker) -> Sent:
    """Send the rows of all runs at or below a folder that the tracker does not have yet."""
    folders = find_runs([path])
    root, rounds = Path(path), 0
    for folder in folders:
        history = read(folder)
        own = copy.copy(tracker)
        own._strict = True
        own.begin(RunInfo(_name(folder, root), folder.config, len(history.rows), folder.path, history.rows))
        own.end(folder.finished)
        rounds += own._sent - own._first
    return Sent(len(folders), rounds)


def _name(folder: RunFolder, root: Path) -> str:
    return folder.path.name if folder.path == root else str(folder.path.relative_to(root))


def state(run: RunInfo) -> dict[str, Any]:
    """What is known about this run's trackers, from its folder."""
    if run.folder is None:
        return {}
    try:
        held = json.loads((run.folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}


def unsent(folder: Path) -> bool:
    """Whether a tracker is missing rounds of the run in this folder."""
    return bool(_unsent(RunInfo(folder=folder)))


def never_sent(folder: Path) -> bool:
    """Whether no tracker has ever had the run in this folder, or one is missing rounds of it."""
    return "id" not in state(RunInfo(folder=folder)) or unsent(folder)


def _unsent(run: RunInfo) -> list[str]:
    known = state(run).get(UNSENT)
    return list({spec: None for spec in known if isinstance(spec, str)}) if isinstance(known, list) else []


def keep_state(run: RunInfo, more: Mapping[str, Any]) -> None:
    if run.folder is not None:
        write_text(run.folder / STATE, json.dumps(state(run) | dict(more)) + "\n")


def _run_id(run: RunInfo) -> str:
    """The run's id in trackers, created once and stored in the run folder, so that a resumed run keeps it."""
    known = state(run).get("id")
    if isinstance(known, str) and known.isalnum():
        return known
    made = secrets.token_hex(8)
    keep_state(run, {"id": made})
    return made
