"""What the benchmark keeps of a run: its settings by hash, its metrics and its curve."""

from typing import Any

import numpy as np

from ..metrics.curves import area, first_to_reach, swing, tail_mean
from ..metrics.history import History
from ..metrics.rows import Row

Result = dict[str, Any]
COSTS = {"round": "rounds", "uploads": "uploads", "bytes_up": "bytes", "virtual_seconds": "virtual time"}  # until the target is reached
METRICS = {
    "tail": "mean over the last tenth",
    "rare": "rarest tenth of the clients",
    "worst_class": "worst class",
    "area": "area under the curve",
    "swing": "swing",
}  # shares; the page shows them in percent


def measure(run: History, target: float) -> Result:
    """The metrics of a finished run. `rare` is the accuracy on what the tenth of the clients that participated least hold."""
    classes = class_tails(run.rows)
    found: Result = {"tail": tail_mean(run.rows), "area": area(run.rows), "swing": swing(run.rows)}
    tested = classes[~np.isnan(classes)]
    found |= {"rare": rare_accuracy(run, classes), "worst_class": float(tested.min()) if len(tested) else None}
    reached = first_to_reach(run.rows, target) or {}
    found |= {f"{key}_to_target": reached.get(key) for key in COSTS}
    found |= {key: run.rows[-1][key] for key in ("uploads", "bytes_up")}
    curve = [row["test_accuracy"] for row in run.rows if row.get("test_accuracy") is not None]
    rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in found.items() if value is not None}
    return rounded | {"curve": [round(1000 * value) for value in curve]}  # in thousandths


def score_only(run: History) -> Result:
    """What tuning needs of a run."""
    return {"tail": round(tail_mean(run.rows) or 0.0, 5)}


def class_tails(rows: list[Row]) -> np.ndarray:
    """The accuracy of every class, averaged over the last tenth of the run; NaN for one without test samples, empty without classes."""
    found = [row["class_accuracy"] for row in rows if row.get("class_accuracy")]
    width = len(found[-1]) if found else 0
    columns = [[{"accuracy": row["class_accuracy"][c]} if row.get("class_accuracy") else {} for row in rows] for c in range(width)]
    return np.array([tail_mean(column, "accuracy") for column in columns], dtype=float)


def rare_accuracy(run: History, classes: np.ndarray) -> float | None:
    """Class accuracies, weighted by the labels that the rarest tenth of the clients (at least one) holds."""
    if run.class_counts is None or not len(classes):
        return None
    seen = run.active.sum(axis=0)
    rarest = np.argsort(seen, kind="stable")[: max(1, len(seen) // 10)]
    counts = np.asarray(run.class_counts)[rarest]
    shares = (counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)).mean(axis=0)
    tested = ~np.isnan(classes)
    weight = float(shares[tested].sum())
    return float((shares[tested] * classes[tested]).sum()) / weight if weight else None
