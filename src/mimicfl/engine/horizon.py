"""How many rounds a run has: given directly, or as many as a budget of model uploadings pays for."""

import numpy as np

from ..availability import Explicit, Pattern, schedule
from ..errors import UsageError, whole

MOST_ROUNDS = 1_000_000  # of a search for enough rounds that are not empty


def plan(
    pattern: Pattern,
    num_clients: int,
    seed: int,
    class_counts: np.ndarray | None,
    rounds: int | None,
    uploads: int | None,
    uploads_per_round: int,
) -> np.ndarray:
    """The schedule of the whole run, bool [T, N]; it ends after `rounds` or when `uploads` are spent, whichever is first."""
    if rounds is not None:
        whole("rounds", rounds)
    if uploads is None:
        if rounds is None:
            if not isinstance(pattern, Explicit):
                raise UsageError("say how long to train: rounds=100, or uploads=200 to stop at a communication budget")
            rounds = len(pattern.values)
        return schedule(pattern, rounds, num_clients, seed, class_counts)
    needed = whole("uploads", uploads) // uploads_per_round  # rounds that are not empty
    if needed == 0:
        raise UsageError(f"uploads={uploads} does not pay for one round: this algorithm uses {uploads_per_round} a round")
    limit = rounds or (len(pattern.values) if isinstance(pattern, Explicit) else MOST_ROUNDS)
    length = min(limit, 2 * needed)
    while True:
        available = schedule(pattern, length, num_clients, seed, class_counts)
        busy = np.cumsum(available.any(axis=1))
        if busy[-1] >= needed:
            return available[: int(np.searchsorted(busy, needed)) + 1]
        if length == limit:
            if rounds or isinstance(pattern, Explicit):
                return available
            raise UsageError(f"in {limit:,} rounds only {busy[-1]} had any client: {uploads} uploads are out of reach of this availability")
        # Nobody in the first thousand rounds: drawing a million more would only delay the bad news.
        length = limit if length * 4 > limit else length * 4
        if busy[-1] == 0 and length > 10_000:
            limit = length
