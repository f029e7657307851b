"""Participation rates for algorithms that weight clients by them: known from the availability pattern, or estimated during the run."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from .patterns import Pattern
from .selection import All
from .stages import Stages


def known_rates(
    pattern: Pattern, stages: Stages, num_clients: int, seed: int, class_counts: np.ndarray | None, asynchronous: bool = False
) -> np.ndarray:
    """The rate of each client in the long run, [N]; refused where the pattern does not determine it."""
    if asynchronous:
        why = "in asynchronous training it also depends on how fast the clients are"
    elif not isinstance(stages.selection, All):
        why = "it also depends on the selection"
    elif (found := pattern.rates(num_clients, seed, copy.copy(class_counts))) is not None:  # a custom pattern may change it in place
        rates = np.asarray(found, dtype=float)
        if stages.seconds is None or stages.limit is None:
            return rates
        return np.where(stages.seconds <= stages.limit, rates, 0.0)  # a client is in time in every round or in none
    else:
        why = f"{type(pattern).__name__} does not define it"
    raise UsageError(f"the algorithm needs each client's participation rate, but {why}; use participation_rates=estimated")


class EstimatedRates:
    """The share of the rounds so far in which a client was active, this round included.

    forced   how many rounds at the start do not count: their clients were made to participate, which says nothing about their rates
    """

    def __init__(self, num_clients: int, forced: int = 0) -> None:
        self.forced, self.rounds, self.counts = forced, forced, np.zeros(num_clients, dtype=np.int64)

    def update(self, rows: Sequence[dict[str, Any]], active: np.ndarray) -> np.ndarray:
        """The rates [m] of the active clients in the round after these rows; the rows that are new are counted."""
        for row in rows[self.rounds :]:
            self.counts[row["clients"]] += 1
        self.rounds = max(self.rounds, len(rows))
        return np.asarray((self.counts[active] + 1) / (self.rounds - self.forced + 1))
