"""The record of one round: collected while it runs, then written as a row of `rows.jsonl` and as a log line."""

import json
import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Message

from ..metrics.recorder import Recorder
from ..metrics.rows import TOTALS, Row
from ..text import counted
from .messages import SentMessage
from .names import natural_key
from .replies import Update

MOST_SHOWN = 8  # metrics in a log line


@dataclass
class Round:
    """Requests, replies and traffic of one round."""

    t: int
    began: float
    sent: dict[str, SentMessage] = field(default_factory=dict)
    updates: dict[str, Update] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # client -> why its update was not aggregated
    late: dict[str, int] = field(default_factory=dict)  # client -> the earlier round that its aggregated late reply belongs to
    refused_late: dict[str, int] = field(default_factory=dict)  # client -> the earlier round that its refused late reply belongs to
    replies: list[Message] = field(default_factory=list)  # valid ones and errors, in the order of arrival
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)  # "train", "evaluate" (clients), "server" -> metric -> value
    bytes_up: int = 0
    bytes_down: int = 0
    vectors_up: int = 0
    vectors_down: int = 0
    eta_L: float | None = None
    eta: float | None = None
    closed: bool = False  # whether its updates have been aggregated; what arrives now belongs to the next round

    @property
    def on_time(self) -> int:
        """Number of updates for this round; late replies to earlier rounds do not count towards `enough`."""
        return len(self.updates.keys() - self.late.keys())

    @property
    def waiting(self) -> set[str]:
        """Clients of this round that have neither replied nor failed."""
        return {c for c, s in self.sent.items() if c not in self.updates and c not in self.failed and s.t == self.t}

    def row(self, rows: dict[str, int], recorder: Recorder, uploads: int) -> Row:
        """The row of this round: the simulator's columns, and the outcome per client. Adds the round's traffic to the totals."""
        clients, score = sorted(self.updates, key=natural_key), self.metrics.get("server", {})
        sent = {key: getattr(self, key) for key in TOTALS if key != "uploads"}
        recorder.count(uploads=uploads if clients else 0, **sent)
        losses = [u.loss for u in self.updates.values() if u.loss is not None]
        loss, numbers = float(np.mean(losses)) if losses else None, sorted(rows[client] for client in clients)
        return recorder.row(numbers, self.eta_L, self.eta, loss, None, round(time.monotonic() - self.began, 3)) | {
            **{f"test_{key.removeprefix('test_')}": _number(score, key) for key in score if isinstance(score[key], (int, float))},
            "test_loss": _number(score, "test_loss", "loss"),
            "test_accuracy": _number(score, "test_accuracy", "accuracy"),
            "sent": sorted(self.sent, key=natural_key),
            "answered": clients,
            "failed": self.failed,
            "late": self.late,
            "refused_late": self.refused_late,
            "metrics": {kind: {key: _storable(value) for key, value in values.items()} for kind, values in self.metrics.items()},
        }


def log_line(row: dict[str, Any], num_rounds: int) -> str:
    """A row as one line of the log."""
    aggregated = f": {', '.join(row['answered'])}" if row["answered"] else ""
    failed = f"; failed {json.dumps(row['failed'], ensure_ascii=False)}" if row["failed"] else ""
    shown = [f"{key} {value:.4g}" for values in row["metrics"].values() for key, value in values.items() if isinstance(value, float)]
    metrics = f"; {', '.join(shown[:MOST_SHOWN])}" if shown else ""
    late = [(c, t, outcome) for key, outcome in (("late", "aggregated"), ("refused_late", "refused")) for c, t in row[key].items()]
    lines = "".join(f"; late reply of {client} for round {t + 1} {outcome}" for client, t, outcome in late)
    counts = f"{counted(len(row['sent']), 'client')} selected, {counted(len(row['answered']), 'update')} aggregated{aggregated}"
    return f"round {row['round'] + 1}/{num_rounds}: {counts}{failed}{lines}{metrics} ({row['seconds']:.1f} s)"


def _storable(value: Any) -> Any:
    """A metric for the row: JSON has no numbers that are not finite."""
    if isinstance(value, list):
        return [_storable(each) for each in value]
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _number(values: dict[str, Any], *keys: str) -> float | None:
    """The first of these keys that holds a number, if it is finite."""
    found = next((values[key] for key in keys if isinstance(values.get(key), (int, float))), None)
    return None if found is None or not math.isfinite(found) else float(found)
