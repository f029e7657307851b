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
    given = len(pattern.values) if isinstance(pattern, Explicit) else None
    if rounds is not None:
        whole("rounds", rounds, high=MOST_ROUNDS)
    if uploads is None:
        if rounds is None and given is None:
            raise UsageError("say how long to train: rounds=100, or uploads=200 to stop at a communication budget")
        return schedule(pattern, rounds or given or 0, num_clients, seed, class_counts)
    needed = whole("uploads", uploads, high=MOST_ROUNDS) // uploads_per_round  # rounds that are not empty
    if needed == 0:
        raise UsageError(f"uploads={uploads} does not pay for one round: this algorithm uses {uploads_per_round} a round")
    limit = min(rounds or MOST_ROUNDS, given or MOST_ROUNDS)
    length = min(limit, 2 * needed)
    found = 0
    while True:
        available = schedule(pattern, length, num_clients, seed, class_counts)
        busy = np.cumsum(available.any(axis=1))
        if busy[-1] >= needed:
            return available[: int(np.searchsorted(busy, needed)) + 1]
        if length == limit and rounds and (given is None or rounds <= given):
            return available
        if length == given:
            raise UsageError(
                f"the explicit schedule has {given} rounds, {busy[-1]} of them with a client, and {uploads} uploads need {needed}: "
                "lower uploads, say rounds, or give a longer schedule"
            )
        if length == limit or (busy[-1] == found and length >= 10_000):  # nothing new in thousands of rounds
            raise UsageError(
                f"in {length:,} rounds only {busy[-1]} had any client: {uploads} uploads are out of reach of this availability"
            )
        found, length = int(busy[-1]), min(limit, 4 * length)
