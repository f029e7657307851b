"""The three stages of a round: available -> selected -> finished in time."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import UsageError, number
from .selection import All, Candidates, Losses, Selection, Uniform, check_population, chosen

NOBODY = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class RoundClients:
    """Which clients participated in one round, and which did not. `active` are the clients whose updates are aggregated."""

    available: np.ndarray = field(default_factory=lambda: NOBODY)
    selected: np.ndarray = field(default_factory=lambda: NOBODY)
    active: np.ndarray = field(default_factory=lambda: NOBODY)
    late: int = 0  # did not finish before the deadline
    surplus: int = 0  # finished, but after enough others had
    seconds: float = 0.0  # virtual seconds that it took, if the run has a clock
    versions: np.ndarray | None = None  # asynchronous: the server step before which each active client got its model

    def columns(self, num_clients: int) -> dict[str, Any]:
        """The round's entries in its row; `missing` says why the other clients are not among the active."""
        a, s = len(self.available), len(self.selected)
        reasons = {"unavailable": num_clients - a, "not selected": a - s, "late": self.late, "surplus": self.surplus}
        return {"available": a, "selected": s, "missing": {reason: n for reason, n in reasons.items() if n}}


@dataclass(frozen=True)
class Stages:
    """Selection, deadline and clock of a run.

    seconds         [N] virtual seconds that each client needs for a round; None without a clock
    deadline        seconds after which the server stops waiting; None: it waits for all clients
    round_seconds   rounds start at multiples of this time, as in a trace; None: a round starts when the last has ended
    """

    selection: Selection = field(default_factory=All)
    seconds: np.ndarray | None = None
    deadline: float | None = None
    sizes: np.ndarray = field(default_factory=lambda: np.ones(1, dtype=int))
    seed: int = 0
    round_seconds: float | None = None

    def check(self, num_clients: int) -> None:
        """Refuse stages that cannot work, before anything is trained."""
        check_population(self.selection, num_clients)
        if self.selection.first is not None and self.seconds is None:
            raise UsageError(
                "over-select counts the first clients to finish, so clients need a speed or a bandwidth; give speed=lognormal:100"
            )
        if self.deadline is None:
            return
        number("deadline", self.deadline, low=0, open_low=True)
        if self.seconds is None:
            raise UsageError("a deadline needs clients that take time; give speed=lognormal:100 (samples per second) or bandwidth=20")
        if self.deadline < self.seconds.min():
            raise UsageError(
                f"no client can meet the deadline of {self.deadline:g} s; the fastest needs {self.seconds.min():.3g} s: raise the deadline"
            )
        if self.round_seconds is not None and self.deadline > self.round_seconds:
            raise UsageError(
                f"the deadline of {self.deadline:g} s is longer than a round of this availability, {self.round_seconds:g} s; lower it"
            )

    @property
    def trivial(self) -> bool:
        """Is every available client active?"""
        return isinstance(self.selection, All) and self.limit is None

    @property
    def limit(self) -> float | None:
        """When the server stops waiting: at the deadline, at the latest when the next round starts."""
        given = [each for each in (self.deadline, self.round_seconds) if each is not None]
        return min(given) if given and self.seconds is not None else None

    @cached_property  # the median of a large population takes a millisecond
    def idle(self) -> float:
        """The virtual seconds of a round without active clients: the deadline, or what the median client needs."""
        if self.seconds is None:
            return self.round_seconds or 0.0
        return float(self.limit if self.limit is not None else np.median(self.seconds))

    @property
    def clock(self) -> bool:
        """Do rounds take virtual time?"""
        return self.seconds is not None or self.round_seconds is not None

    def ends(self, t: int, before: float, seconds: float) -> float:
        """The virtual time at the end of round t, which took this long and began at time `before` or on the grid of rounds."""
        return (before if self.round_seconds is None else t * self.round_seconds) + seconds

    def round(self, t: int, available: np.ndarray, losses: Losses) -> RoundClients:
        """The clients of round t, given the numbers of the available clients."""
        if not len(available):
            return RoundClients(seconds=self.idle)
        selected = available
        if not isinstance(self.selection, All):
            selected = chosen(self.selection, Candidates(t, available, self.sizes, self.seed, losses))
        return self._finished(available, selected)

    def _finished(self, available: np.ndarray, selected: np.ndarray) -> RoundClients:
        if self.seconds is None:
            return RoundClients(available, selected, selected, seconds=self.idle)
        need = self.seconds[selected]
        in_time = need <= self.limit if self.limit is not None else np.ones(len(selected), dtype=bool)
        wanted = len(selected) if self.selection.first is None else min(self.selection.first, len(selected))
        order = np.argsort(need, kind="stable")  # of equally fast clients the lower number comes first
        counted = order[in_time[order]][:wanted]
        # The server waits for the last client that it counts, or until the limit for those that never finish.
        took = float(need[counted].max()) if len(counted) == wanted and wanted else self.idle
        late = int((~in_time).sum())
        return RoundClients(available, selected, np.sort(selected[counted]), late, len(selected) - late - len(counted), took)

    def schedule(self, available: np.ndarray) -> np.ndarray:
        """The active clients of every round, bool [T, N].

        If the selection depends on the model, this is only an estimate of how many clients are active.
        """
        if self.trivial:
            return available
        known = self
        if self.selection.needs_model:
            most = self.selection.num_selected
            known = Stages(All() if most is None else Uniform(most), self.seconds, self.deadline, self.sizes, self.seed, self.round_seconds)
        active = np.zeros_like(available)
        for t, row in enumerate(available):
            active[t, known.round(t, np.flatnonzero(row), _no_losses).active] = True
        return active


def _no_losses(clients: np.ndarray) -> np.ndarray:
    raise UsageError("the selection asks for losses, which are not known before the run; set needs_model = True in its class")
