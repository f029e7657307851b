"""How a task interprets the outputs of a batch, for metrics."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Predictions:
    """Predicted classes and targets of a batch, in one form for all layouts: P targets per sample, each with a score per class."""

    scores: Tensor  # [B, P, C]
    labels: Tensor  # [B, P]; any number where not counted
    counted: Tensor  # bool [B, P]
    per_label: bool = False  # the P targets are different labels, each absent (0) or present (1)


class Reader(Protocol):
    """The part of a task that metrics use."""

    name: str

    def predictions(self, output: Tensor, target: Any) -> Predictions | None:
        """Return predicted classes and targets; None if the targets are not classes."""
