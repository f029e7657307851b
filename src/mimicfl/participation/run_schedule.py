"""Which clients participate in each round of a run, whose length is a number of rounds or a budget of model uploads."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import UsageError, integer
from . import Explicit, Pattern, schedule
from .asynchronous import Arrivals, Buffered, arrivals
from .selection import All, Losses
from .stages import RoundClients, Stages

FIRST_ROUNDS = 256  # of the pattern that an asynchronous run draws at first
MOST_ROUNDS = 1_000_000  # limit of the search for enough nonempty rounds
FEW = 2**22  # entries of a schedule up to which its available clients are listed; in a longer one, scanning a round costs little more


@dataclass
class Participation:
    """The rounds of a run: which clients are available, selected, and finish.

    `active` is known before the run, unless the selection depends on the model: then it is an estimate until a round has started.
    """

    available: np.ndarray  # bool [T, N]
    active: np.ndarray  # bool [T, N]
    stages: Stages
    arrivals: Arrivals | None = None  # of an asynchronous run
    counts_uploads: bool = False  # whether the run ends when a number of uploads is reached, which assumes that all rounds are as estimated

    @property
    def staged(self) -> Stages | None:
        """The stages of a round; None if all available clients are active and there is no clock."""
        return self.stages if self.stages.clock or not self.stages.trivial else None

    @cached_property
    def active_per_round(self) -> np.ndarray:
        """[T] an estimate if the selection depends on the model."""
        return np.asarray(self.active.sum(axis=1))

    def round(self, t: int, losses: Losses) -> RoundClients:
        """The clients of round t. `losses` is called only by selections that depend on the model."""
        if self.arrivals is not None:
            clients, before = self.arrivals.clients[t], float(self.arrivals.times[t - 1]) if t else 0.0
            took = float(self.arrivals.times[t]) - before
            return RoundClients(clients, clients, clients, seconds=took, versions=self.arrivals.versions[t])
        now = self.stages.round(t, self._here(t), losses)
        if self.stages.selection.needs_model:
            self.active[t] = False
            self.active[t, now.active] = True
            if self.counts_uploads and len(now.available) and not len(now.active):
                raise UsageError(
                    f"the selection picks none of the {len(now.available)} available clients in round {t}, so the run would end with fewer "
                    "uploads than asked for; give rounds instead of uploads"
                )
        return now

    def columns(self, t: int, now: RoundClients, before: float) -> dict[str, Any]:
        """What the row of round t says about stages and clock; `before` is the virtual time at which the last round ended."""
        if now.versions is not None:
            return {"staleness": (t - now.versions).tolist(), "virtual_seconds": round(before + now.seconds, 6)}
        found = {} if self.stages.trivial else now.columns(self.available.shape[1])
        if self.stages.clock:
            found["virtual_seconds"] = round(self.stages.ends(t, before, now.seconds), 6)
        return found

    def _here(self, t: int) -> np.ndarray:
        """The clients available in round t."""
        if self._lists is None:
            return np.flatnonzero(self.available[t])
        clients, begin = self._lists
        return clients[begin[t] : begin[t + 1]].copy()  # a custom selection may change it in place

    @cached_property
    def _lists(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The available clients of all rounds, one round after another, and where each round begins: no round then scans the population."""
        rounds, n = self.available.shape
        if np.count_nonzero(self.available) > FEW:
            return None
        entries = np.flatnonzero(self.available)
        return entries % n, np.searchsorted(entries, np.arange(rounds + 1) * n)


def participation(
    pattern: Pattern,
    stages: Stages,
    num_clients: int,
    seed: int,
    class_counts: np.ndarray | None,
    rounds: int | None,
    uploads: int | None,
    uploads_per_round: int,
    buffered: Buffered | None = None,
) -> Participation:
    """Which clients participate in the whole run. It ends after `rounds` or when `uploads` are used up, whichever comes first."""
    if buffered is not None:
        return _asynchronous(buffered, pattern, stages, num_clients, seed, class_counts, _steps(rounds, uploads, uploads_per_round))
    stages.check(num_clients)
    if uploads is not None and stages.selection.needs_model and stages.limit is not None:
        raise UsageError(
            "with a deadline and a selection that depends on the model, the uploads are not known in advance; give rounds instead"
        )
    available = run_schedule(pattern, num_clients, seed, class_counts, rounds, uploads, uploads_per_round, stages)
    return Participation(available, stages.schedule(available), stages, counts_uploads=uploads is not None)


def _steps(rounds: int | None, uploads: int | None, uploads_per_round: int) -> int:
    """The server steps of an asynchronous run; every one has arrivals."""
    given = [] if rounds is None else [rounds]
    if uploads is not None:
        given.append(integer("uploads", uploads) // uploads_per_round)
    if not given or min(given) == 0:
        raise UsageError("set how long to train: rounds=100 server steps, or uploads=200 to stop at a communication budget")
    return integer("rounds", min(given), high=MOST_ROUNDS)


def _asynchronous(
    buffered: Buffered, pattern: Pattern, stages: Stages, num_clients: int, seed: int, class_counts: np.ndarray | None, steps: int
) -> Participation:
    buffered.check(num_clients)
    if stages.seconds is None:
        raise UsageError("asynchronous training needs clients that take time; give speed=lognormal:100 or bandwidth=20")
    if stages.deadline is not None or not isinstance(stages.selection, All):
        raise UsageError("asynchronous training has no deadline and no selection; concurrency says how many clients train at once")
    drawn = [schedule(pattern, FIRST_ROUNDS if not isinstance(pattern, Explicit) else len(pattern.values), num_clients, seed, class_counts)]

    def available(tick: int) -> np.ndarray:
        while tick >= len(drawn[0]):
            if isinstance(pattern, Explicit):
                raise UsageError(f"the explicit schedule ends after {len(drawn[0])} rounds, before the run does; give a longer schedule")
            drawn[0] = schedule(pattern, 4 * len(drawn[0]), num_clients, seed, class_counts)
        return np.asarray(drawn[0][tick])

    length = stages.round_seconds or float(np.median(stages.seconds))
    found = arrivals(buffered, stages.seconds, available, length, steps, seed)
    active = np.zeros((steps, num_clients), dtype=bool)
    for t, clients in enumerate(found.clients):
        active[t, clients] = True
    return Participation(active, active, stages, found)


def run_schedule(
    pattern: Pattern,
    num_clients: int,
    seed: int,
    class_counts: np.ndarray | None,
    rounds: int | None,
    uploads: int | None,
    uploads_per_round: int,
    stages: Stages | None = None,
) -> np.ndarray:
    """Return which clients are available in the whole run, bool [T, N]; with `stages`, only rounds with an active client use up uploads."""
    given = len(pattern.values) if isinstance(pattern, Explicit) else None
    if rounds is not None:
        integer("rounds", rounds, high=MOST_ROUNDS)
    if uploads is None:
        if rounds is None and given is None:
            raise UsageError("set how long to train: rounds=100, or uploads=200 to stop at a communication budget")
        return schedule(pattern, rounds or given or 0, num_clients, seed, class_counts)
    needed = integer("uploads", uploads, high=MOST_ROUNDS) // uploads_per_round  # nonempty rounds
    if needed == 0:
        raise UsageError(f"uploads={uploads} is less than the {uploads_per_round} uploads of one round: raise uploads")
    limit = min(rounds or MOST_ROUNDS, given or MOST_ROUNDS)
    length = min(limit, 2 * needed)
    found = 0
    while True:
        available = schedule(pattern, length, num_clients, seed, class_counts)
        active = available if stages is None else stages.schedule(available)
        busy = np.cumsum(active.any(axis=1))
        if busy[-1] >= needed:
            return available[: int(np.searchsorted(busy, needed)) + 1]
        if length == limit and rounds and (given is None or rounds <= given):
            return available
        if length == given:
            raise UsageError(
                f"the explicit schedule has {given} rounds, {busy[-1]} of them with a client, and {uploads} uploads need {needed}: "
                "lower uploads, set rounds, or give a longer schedule"
            )
        if length == limit or (busy[-1] == found and length >= 10_000):  # no nonempty round in thousands of new rounds
            raise UsageError(
                f"only {busy[-1]} of {length:,} rounds have active clients: {uploads} uploads cannot be reached with this availability; "
                "lower uploads or choose another availability"
            )
        found, length = int(busy[-1]), min(limit, 4 * length)
