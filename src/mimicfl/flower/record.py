"""What became of a round: gathered while it runs, then one row of the run folder and one sentence of the log."""

import json
import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import RecordDict

from .post import Sent
from .server import natural
from .wire import Update


@dataclass
class Round:
    """What became of one round."""

    t: int
    began: float
    sent: dict[str, Sent] = field(default_factory=dict)
    updates: dict[str, Update] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # client -> why it is not counted
    late: dict[str, int] = field(default_factory=dict)  # client -> the earlier round that its counted answer was for
    stale: dict[str, int] = field(default_factory=dict)  # client -> the earlier round that its refused answer was for
    contents: list[RecordDict] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0
    vectors_up: int = 0
    vectors_down: int = 0
    eta_L: float | None = None
    eta: float | None = None

    @property
    def on_time(self) -> int:
        """Answers to this round's own letters: late ones of earlier rounds do not fill it up."""
        return len(self.updates.keys() - self.late.keys())

    @property
    def waiting(self) -> set[str]:
        return {c for c, s in self.sent.items() if c not in self.updates and c not in self.failed and s.t == self.t}

    def row(self, rows: dict[str, int], totals: dict[str, int], uploads: int, score: dict[str, Any]) -> dict[str, Any]:
        """As the simulator's rows, with who was asked and what became of them; `totals` are brought up to date."""
        clients = sorted(self.updates, key=natural)
        totals["uploads"] += uploads if clients else 0
        for key in ("vectors_up", "vectors_down", "bytes_up", "bytes_down"):
            totals[key] += getattr(self, key)
        losses = [u.loss for u in self.updates.values() if u.loss is not None]
        return {
            "round": self.t,
            "active": len(clients),
            "clients": sorted(rows[client] for client in clients),
            "empty": not clients,
            "local_lr": self.eta_L,
            "global_lr": self.eta,
            **totals,
            "train_loss": float(np.mean(losses)) if losses else None,
            "test_loss": _number(score, "test_loss", "loss"),
            "test_accuracy": _number(score, "test_accuracy", "accuracy"),
            "class_accuracy": None,
            "seconds": round(time.monotonic() - self.began, 3),
            "sent": sorted(self.sent, key=natural),
            "answered": clients,
            "failed": self.failed,
            "late": self.late,
            "refused_late": self.stale,
        }


def sentence(row: dict[str, Any], num_rounds: int) -> str:
    """A row in words."""
    counted, left_out = ", ".join(row["answered"]) or "nobody", json.dumps(row["failed"], ensure_ascii=False) if row["failed"] else "nobody"
    late = [(c, t, what) for group, what in (("late", "counted"), ("refused_late", "refused")) for c, t in row[group].items()]
    words = "".join(f"; late answer of {client} for round {t + 1} {what}" for client, t, what in late)
    asked = f"asked {len(row['sent'])}, counted {counted}, left out {left_out}{words}"
    return f"[round {row['round'] + 1}/{num_rounds}] {asked} ({row['seconds']:.1f} s)"


def _number(told: dict[str, Any], *keys: str) -> float | None:
    found = next((told[key] for key in keys if isinstance(told.get(key), (int, float))), None)
    return None if found is None or not math.isfinite(found) else float(found)
