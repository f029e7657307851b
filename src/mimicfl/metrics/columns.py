"""The metrics of a run by column: which one comes first, what it is called, and how its values are written. Without PyTorch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

PERCENT = frozenset({"test_accuracy", "test_balanced_accuracy", "test_macro_f1", "test_auroc"})  # shown in percent
SPECIAL = {"rmse": "RMSE", "auroc": "AUROC", "macro_f1": "macro F1"}


def task_columns(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of the metrics that these runs were made with, in order."""
    names = [name for config in configs for name in str(config.get("metrics") or "").split(",") if name and name != "auto"]
    return list(dict.fromkeys("test_" + name.replace("-", "_") for name in names))


def primary(values: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """The metric to show of a row: the first of the run's task, else accuracy, the distance to a known optimum or the test loss.

    None if the row has none of them.

    >>> primary({"test_loss": 0.4, "test_accuracy": 0.9, "test_macro_f1": 0.8}, {"metrics": "macro-f1,accuracy"})
    'test_macro_f1'
    """
    order = (*task_columns([config]), "test_accuracy", "distance", "test_loss")
    return next((column for column in order if values.get(column) is not None), None)


def shown_primary(values: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """`test accuracy 81.2 %`: the metric of a row and its value; empty if the row has none.

    >>> shown_primary({"test_loss": 0.4, "test_rmse": 1.25}, {"metrics": "rmse"})
    'test RMSE 1.25'
    """
    column = primary(values, config)
    return "" if column is None else f"{head(column)} {show(column, values[column])}"


def percent(column: str) -> bool:
    """Whether the column is shown in percent."""
    return column in PERCENT


def head(column: str) -> str:
    """The name of a column in a table."""
    if column == "distance":
        return "distance to optimum"
    words = column.removeprefix("test_")
    return "test " * column.startswith("test_") + SPECIAL.get(words, words.replace("_", " "))


def show(column: str, mean: float, std: float | None = None) -> str:
    """A mean, with its standard deviation if there is one."""
    if math.isnan(mean):
        return "–"
    if percent(column):
        return f"{100 * mean:.1f} %" if std is None else f"{100 * mean:.1f} ± {100 * std:.1f} %"
    return f"{mean:.4g}" if std is None else f"{mean:.4g} ± {std:.2g}"
