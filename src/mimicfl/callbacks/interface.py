"""Callbacks: what they receive at the start of a run and after each round, and what they may change."""

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from ..errors import UsageError, shown
from ..metrics.recorder import Recorder
from ..metrics.rows import RESERVED, Row


@dataclass(frozen=True)
class RunInfo:
    """A run that starts or resumes.

    name        of its folder within a comparison or sweep; empty for a single run
    config      its settings
    rounds      the number of its rounds
    folder      where it is stored, or None
    rows        those of earlier rounds, if it resumes
    directions  of the task's metrics, by column: whether a larger value is better
    """

    name: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 0
    folder: Path | None = None
    rows: Sequence[Row] = ()
    directions: Mapping[str, bool] = field(default_factory=dict)

    @classmethod
    def of(
        cls, recorder: Recorder, config: Mapping[str, Any], rounds: int, name: str = "", directions: Mapping[str, bool] | None = None
    ) -> "RunInfo":
        """The run of this recorder, as copies: a callback cannot change the run's settings or rows."""
        folder = None if recorder.folder is None else recorder.folder.path
        return cls(name, copied(config), rounds, folder, tuple(copied(recorder.rows)), dict(directions or {}))


class RoundInfo:
    """The argument of a callback: a round that has just ended.

    row      the round's row, a copy
    rounds   the number of rounds of the run
    params   the global model (with averaged models: their mean) as a vector [d], a copy on the CPU
    model()  the same as a new module, in evaluation mode, on the run's device
    run      the run, a `RunInfo`; `run.name` identifies it within a comparison
    stop()   stop the run after this round
    """

    def __init__(self, row: Row, run: RunInfo, params: Callable[[], Tensor], model: Callable[[], nn.Module]) -> None:
        self.row, self.run, self.rounds, self.stopped = copied(row), run, run.rounds, False
        self._params, self._model = params, model

    @property
    def params(self) -> Tensor:
        return self._params()

    def model(self) -> nn.Module:
        return self._model()

    def stop(self) -> None:
        self.stopped = True


class Callback:
    """Base class of callbacks: override what you need. Every run of a comparison or sweep gets its own copy, made before its first round.

    A callback that only observes sets `part_of_result = False`: it does not change the run's fingerprint, is called after the row is
    stored, and can neither add to the row nor stop the run.
    """

    part_of_result: ClassVar[bool] = True

    def begin(self, run: RunInfo) -> None:
        """Called before the first round, or before the next one if the run resumes; `run.rows` holds the rounds before it."""

    def each_round(self, now: RoundInfo) -> Mapping[str, Any] | None:
        """Called after every round. A dict that is returned is added to the row."""
        return None

    def end(self, finished: bool) -> None:
        """Called after the last round, or when the run is interrupted by an error."""


def copied(value: Any) -> Any:
    """A copy of a row or of settings, including its lists and dicts, so that a callback cannot change the original."""
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) if isinstance(each, (list, dict)) else each for each in value] if isinstance(value, list) else value


EachRound = Callable[[RoundInfo], Mapping[str, Any] | None]


class CallbackSet:
    """The callbacks of one run: functions and `Callback` objects."""

    def __init__(self, given: Sequence[Callback | EachRound] = ()) -> None:
        self.given = list(given)
        self.active: list[Callback] = []

    @property
    def of_result(self) -> list[Callback | EachRound]:
        """The callbacks that the run's fingerprint includes."""
        return [each for each in self.given if getattr(each, "part_of_result", True)]

    def begin(self, run: RunInfo) -> None:
        self.run = run
        for each in self.given:
            self.active.append(copy.copy(each) if isinstance(each, Callback) else _Function(each))
            self.active[-1].begin(run)

    def record(
        self,
        row: Row,
        info: Callable[[Row, RunInfo], RoundInfo],
        store: Callable[[Row], None],
        last: Callable[[], Row] = dict,
    ) -> None:
        """Let the callbacks measure the round, store its row, and show it to those that only observe.

        `last` returns what the row of a round holds in addition if a callback stops the run after it.
        """
        if self._measure(row, info):
            row |= {**last(), "stopped": True}
        store(row)
        for each in self.active:
            if not each.part_of_result:
                each.each_round(info(row, self.run))

    def _measure(self, row: Row, info: Callable[[Row, RunInfo], RoundInfo]) -> bool:
        """Add to the row what the callbacks return; True if one of them stops the run."""
        stopped = False
        for each in self.active:
            if each.part_of_result:
                now = info(row, self.run)
                _add(row, each.each_round(now))
                stopped |= now.stopped
        return stopped

    def end(self, finished: bool) -> None:
        active, self.active = self.active, []
        for each in active:
            each.end(finished)


class _Function(Callback):
    """A user's function as a callback."""

    def __init__(self, function: EachRound) -> None:
        self.function = function

    def each_round(self, now: RoundInfo) -> Mapping[str, Any] | None:
        return self.function(now)


def callback_set(each_round: EachRound | None, callbacks: Any) -> CallbackSet:
    """The callbacks given to `simulate`, `run`, `compare` or `sweep`, checked."""
    if each_round is not None and not callable(each_round):
        raise UsageError(f"each_round must be a function, got {shown(each_round)}")
    if isinstance(callbacks, (Callback, str, Mapping)) or callable(callbacks) or not hasattr(callbacks, "__iter__"):
        raise UsageError(f"callbacks must be a list, as in callbacks=[mf.callbacks.EarlyStopping(patience=10)], got {shown(callbacks)}")
    given = list(callbacks)
    for each in given:
        if isinstance(each, type) or not (isinstance(each, Callback) or callable(each)):
            raise UsageError(f"a callback must be a function or an object such as mf.callbacks.EarlyStopping(), got {shown(each)}")
    return CallbackSet([*([each_round] if each_round is not None else []), *given])


def _add(row: Row, found: Any) -> None:
    if found is not None and not isinstance(found, Mapping):
        raise UsageError(f"each_round must return a dict of measurements or nothing, got {found!r}; to stop the run, call .stop()")
    for key, value in (found or {}).items():
        if key in row or key in RESERVED or not isinstance(key, str):
            raise UsageError(f"each_round returned {key!r}, which is already a column of the rows: choose another name")
        try:
            plain = value.tolist() if hasattr(value, "tolist") else value  # tensors and numbers of NumPy
            row[key] = None if isinstance(plain, float) and not math.isfinite(plain) else json.loads(json.dumps(plain, allow_nan=False))
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(f"each_round returned {key}={value!r}: return numbers, strings or lists of them") from None
