"""A metric on every client's own test samples, summarized by how often the clients have participated so far."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

GROUPS = ("never_seen", "rarest_tenth", "rare", "often")
COLUMNS = tuple(f"clients_{name}" for name in ("mean", "worst_tenth", "spread", *GROUPS))


class Visits:
    """How often each client has been active so far, and in which round it last was; every round is counted once."""

    def __init__(self, num_clients: int, active: Iterable[Sequence[int]] = ()) -> None:
        self.rounds, self.counts, self.last = 0, np.zeros(num_clients, dtype=int), np.zeros(num_clients, dtype=int)
        for clients in active:
            self._count(clients)

    def _count(self, clients: Sequence[int]) -> None:
        self.counts[list(clients)] += 1
        self.last[list(clients)] = self.rounds
        self.rounds += 1

    def until(self, rows: Sequence[Mapping[str, Any]], active: Sequence[int]) -> "Visits":
        """Count the rounds of these rows and the one after them, as far as they have not been counted."""
        for clients in [*(row["clients"] for row in rows[self.rounds :]), active][: len(rows) + 1 - self.rounds]:
            self._count(clients)
        return self


def participation_groups(visits: Visits) -> dict[str, np.ndarray]:
    """The clients by participation so far.

    `never_seen`; of those seen, `rarest_tenth`, the others of the rarer half (`rare`), and the more frequent half (`often`). Of equally
    frequent clients, the one seen longest ago counts as rarer.
    """
    counts, last = visits.counts, visits.last
    seen = np.flatnonzero(counts)
    order = seen[np.lexsort((seen, last[seen], counts[seen]))]
    tenth = -(-len(order) // 10)
    half = max(len(order) // 2, tenth)
    return dict(zip(GROUPS, (np.flatnonzero(counts == 0), order[:tenth], order[tenth:half], order[half:]), strict=True))


def summary(values: Sequence[float | None], visits: Visits, higher_is_better: bool) -> dict[str, float | None]:
    """Columns of a row: mean, worst tenth and standard deviation over clients, and the mean of each participation group."""
    found = np.array([np.nan if value is None else value for value in values], dtype=float)
    known = np.sort(found[~np.isnan(found)])
    tenth = -(-len(known) // 10)
    worst = known[:tenth] if higher_is_better else known[len(known) - tenth :]
    columns = {"mean": _mean(known), "worst_tenth": _mean(worst), "spread": float(known.std()) if len(known) else None}
    columns |= {name: _mean(found[group]) for name, group in participation_groups(visits).items()}
    return {f"clients_{name}": value for name, value in columns.items()}


def _mean(values: np.ndarray) -> float | None:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else None
