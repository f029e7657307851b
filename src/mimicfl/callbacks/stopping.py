"""Stop a run when a metric no longer improves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError, integer, number, one_of
from ..metrics.rows import Row
from ..tasks.metrics import higher_is_better
from .interface import Callback, RoundInfo, RunInfo


@dataclass
class EarlyStopping(Callback):
    """Stop after `patience` rounds in which the metric did not improve by more than `min_delta`, at the next one that measures it.

    metric    a column of the rows: `test_accuracy`, `test_loss`, or one that a callback before this one adds
    mode      "max" if larger values are better, "min" if smaller ones are; "auto" follows the metric, or the column's name

    A resumed run continues to count where it stopped: the rounds so far are in its rows.
    """

    metric: str = "test_accuracy"
    patience: int = 10
    min_delta: float = 0.0
    mode: str = "auto"
    best: float | None = field(default=None, init=False, repr=False)
    since: int = field(default=0, init=False, repr=False)  # rounds since the best one

    def __post_init__(self) -> None:
        integer("patience", self.patience)
        number("min_delta", self.min_delta, low=0)
        one_of("mode", self.mode, ("auto", "max", "min"))

    def begin(self, run: RunInfo) -> None:
        for row in run.rows:
            self._see(row, run)

    def each_round(self, now: RoundInfo) -> Mapping[str, Any] | None:
        value = measured(now.row, self.metric, "early stopping")
        self._see(now.row, now.run)
        if value is not None and self.since >= self.patience:  # a round without a value never stops the run
            now.stop()
        return None

    def _see(self, row: Row, run: RunInfo) -> None:
        value = row.get(self.metric)
        self.since += 1
        if value is not None and improves(larger_is_better(self.metric, self.mode, run), value, self.best, self.min_delta):
            self.best, self.since = value, 0


def measured(row: Row, metric: str, what: str) -> float | None:
    """The metric's value in this row; None if the round was not evaluated. Raises `UsageError` if the run does not have the metric."""
    value: float | None = row.get(metric)
    if metric not in row or (value is None and metric == "test_accuracy" and row.get("test_loss") is not None):
        found = [name for name, each in row.items() if isinstance(each, float)]
        raise UsageError(f"{what} needs the metric {metric!r}, which this run does not have; choose one of: {', '.join(found)}")
    return value


def larger_is_better(metric: str, mode: str, run: RunInfo) -> bool:
    """Whether larger values of a metric are better, as `mode` says, or the run's metric itself."""
    return mode == "max" or (mode == "auto" and higher_is_better(metric, run.directions))


def improves(rises: bool, value: float, best: float | None, least: float = 0.0) -> bool:
    """Is the value better than the best so far, by more than `least`? `rises`: larger values are better."""
    return best is None or (value - best if rises else best - value) > least
