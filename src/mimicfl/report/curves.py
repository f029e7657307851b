"""Curves: a metric of a run against rounds, uploads, bytes or time, and the mean over seeds."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..metrics.history import History
from ..metrics.rows import RESERVED, TOTALS, Row
from .columns import NAMES, OWN_TEST

AXES = {
    "uploads": "model uploads",
    "round": "rounds",
    "megabytes": "megabytes uploaded, all clients",
    "seconds": "wall-clock time (s)",
    "virtual_seconds": "virtual time (s)",
}
DEFAULT_AXES = ("uploads", "round")  # the first on which the mean curves reach the ends of all seeds
EARLY = "Mean curves end where their first seed ends; the table shows the last round of every seed."
BY_POSITION = ("megabytes", "seconds", "virtual_seconds")  # runs differ in these at the same round
# Columns of rows that are not metrics of the user.
COLUMNS = {
    "round",
    "active",
    "clients",
    "empty",
    "local_lr",
    "global_lr",
    "class_accuracy",
    "seconds",
    *TOTALS,
    *RESERVED,
    *NAMES,
    *OWN_TEST,
}


@dataclass(frozen=True)
class Curve:
    """Mean and standard deviation over the seeds."""

    x: list[float]
    mean: list[float]
    std: list[float]
    early: bool = False  # some seed has later points


def series(rows: Sequence[Row], metric: str, axis: str) -> list[tuple[float, float]]:
    """The points (x, y) of one run. Of rounds with the same x (empty rounds upload nothing) the last one counts."""
    points: dict[float, float] = {}
    for row, x in zip(rows, positions(rows, axis), strict=True):
        if row.get(metric) is not None and x is not None:
            points[x] = float(row[metric])
    return sorted(points.items())


def positions(rows: Sequence[Row], axis: str) -> list[float | None]:
    """Where each row lies on the axis; None if the row does not say."""
    if axis == "seconds":
        return list(itertools.accumulate(float(row.get("seconds") or 0.0) for row in rows))
    if axis == "virtual_seconds":
        return [as_number(row.get(axis)) for row in rows]
    scale = {"megabytes": ("bytes_up", 1e-6, 0), "round": ("round", 1, 1), "uploads": ("uploads", 1, 0)}[axis]
    column, factor, offset = scale
    return [float(factor * row[column] + offset) for row in rows]


def average(runs: list[list[tuple[float, float]]], by_position: bool) -> Curve:
    """The mean curve of several runs: at the x values they share, or by position if x differs between runs."""
    runs = [run for run in runs if run]
    if not runs:
        return Curve([], [], [])
    if by_position:
        length = min(map(len, runs))
        table = np.array([run[:length] for run in runs])  # [seeds, points, 2]
        x, y = table[:, :, 0].mean(axis=0), table[:, :, 1]
        early = any(len(run) > length for run in runs)
    else:
        by_x = [dict(run) for run in runs]
        shared = sorted(set.intersection(*map(set, by_x)))
        x, y = np.array(shared), np.array([[values[v] for v in shared] for values in by_x])
        early = any(run[-1][0] != shared[-1] for run in runs) if shared else True
    std = y.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros(len(x))
    return Curve(x.tolist(), y.mean(axis=0).tolist(), std.tolist(), early)


def axes_of(runs: Iterable[History]) -> dict[str, str]:
    """The axes that these runs have values for."""
    found = list(runs)
    return {axis: label for axis, label in AXES.items() if axis != "virtual_seconds" or any(run.last(axis) is not None for run in found)}


def own_metrics(runs: Iterable[History]) -> list[str]:
    """Columns of numbers that callbacks have added to the rows."""
    keys = dict.fromkeys(key for run in runs for row in run.rows for key, value in row.items() if as_number(value) is not None)
    return [key for key in keys if key not in COLUMNS and key != "crc"]


def as_number(value: object) -> float | None:
    """The value of a number; None for everything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
