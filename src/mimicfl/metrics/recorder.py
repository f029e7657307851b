"""Record the rounds of a run, simulated or deployed: one row per round, running totals, checkpoints and the result.

The docstring of `History` lists the columns of a row. The totals count from the first round.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .evaluate import Score
from .rows import TOTALS, Row
from .store import RunFolder

Saved = tuple[dict[str, Tensor], dict[str, str]]  # tensors and metadata


class Recorder:
    """The rows of one run, stored in its folder if it has one."""

    def __init__(self, folder: RunFolder | None = None) -> None:
        self.folder, self.rows, self.totals = folder, list[Row](), dict.fromkeys(TOTALS, 0)

    @property
    def t(self) -> int:
        """The number of the next round."""
        return len(self.rows)

    @property
    def stopped(self) -> bool:
        """Whether a callback stopped the run after its last round."""
        return bool(self.rows) and bool(self.rows[-1].get("stopped"))

    def restore(self, rows: list[Row]) -> None:
        """Continue after these rows."""
        self.rows = rows
        if rows:
            self.totals = {key: rows[-1][key] for key in TOTALS}

    def count(self, **added: int) -> None:
        """Add to the totals."""
        for key, value in added.items():
            self.totals[key] += value

    def row(
        self, clients: Sequence[int], eta_L: float | None, eta: float | None, train_loss: float | None, score: Score | None, seconds: float
    ) -> Row:
        """The row of the round that has just ended."""
        return {
            "round": self.t,
            "active": len(clients),
            "clients": list(clients),
            "empty": not clients,
            "local_lr": eta_L,
            "global_lr": eta,
            **self.totals,
            "train_loss": train_loss,
            **scored(score),
            "seconds": seconds,
        }

    def append(self, row: Row) -> None:
        self.rows.append(row)
        if self.folder is not None:
            self.folder.append(row)

    def save(self, name: str, tensors: dict[str, Tensor], facts: Mapping[str, str]) -> None:
        """Write a `checkpoint`, or the result as `final`, for the rounds up to the last row."""
        if self.folder is not None:
            self.folder.save(name, tensors, **{"round": str(self.t), **facts})

    def finish(self, model: tuple[Tensor, dict[str, Tensor]], facts: Mapping[str, str], more: Mapping[str, Tensor] | None = None) -> None:
        """Write the result, last of all: the model with its buffers, and `more` tensors."""
        w, buffers = model
        self.save("final", {"params": w} | {f"buffer.{name}": value for name, value in buffers.items()} | dict(more or {}), facts)

    def close(self) -> None:
        if self.folder is not None:
            self.folder.close()


def scored(score: Score | None) -> dict[str, Any]:
    """The columns of a row that come from an evaluation; all None without one."""
    if score is None:
        return {"test_loss": None, "test_accuracy": None, "class_accuracy": None}
    return {"test_loss": score.loss, "test_accuracy": score.accuracy, "class_accuracy": score.class_accuracy, **score.metrics}
