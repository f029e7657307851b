"""Statistics of a schedule: participation, gaps, empty rounds."""

from dataclasses import dataclass

import numpy as np

from ..errors import UsageError
from ..text import counted


@dataclass(frozen=True)
class Observed:
    """Statistics of one schedule [T, N].

    A gap tau(t, i) is the number of rounds from one participation of a client to its next; 1 means two consecutive rounds.
    """

    rounds: int
    clients: int
    participation: np.ndarray  # [N] share of rounds in which each client participates
    active_per_round: np.ndarray  # [T]
    gaps: np.ndarray  # all gaps tau(t, i), of all clients
    tau_max: int  # largest gap of clients that participate, including the waits before the first and after the last participation
    empty_rounds: int
    never_seen: int
    all_seen_at: int | None  # first round after which all clients have participated at least once

    def sentences(self) -> list[str]:
        """Return the statistics as lines of text."""
        p, m = self.participation, self.active_per_round
        lines = [
            f"{self.clients} clients, {self.rounds} rounds, {m.mean():.1f} active per round ({m.min()} to {m.max()})",
            f"participation {100 * p.mean():.0f} % on average; rarest client {100 * p.min():.0f} %, most frequent {100 * p.max():.0f} %",
            f"largest gap tau_max = {self.tau_max}; {counted(self.empty_rounds, 'empty round')}",
        ]
        if self.gaps.size:
            lines[2] += f"; gaps: median {np.median(self.gaps):.0f}, 90 % within {np.quantile(self.gaps, 0.9):.0f}"
        if self.never_seen:
            lines.append(f"{self.never_seen} client{'s never participate' if self.never_seen > 1 else ' never participates'}")
        elif self.all_seen_at is not None:
            lines.append(f"all clients have participated after round {self.all_seen_at}")
        return lines

    def _repr_html_(self) -> str:
        return "<br>".join(self.sentences())


def observe(available: np.ndarray) -> Observed:
    """Compute the statistics of a schedule, bool [T, N]."""
    if not isinstance(available, np.ndarray) or available.ndim != 2 or available.dtype != bool or not available.size:
        got = f"{available.dtype} of shape {available.shape}" if isinstance(available, np.ndarray) else type(available).__name__
        raise UsageError(f"a schedule must be a bool array [rounds, clients] as availability.schedule returns it, got {got}")
    rounds, clients = available.shape
    gaps: list[np.ndarray] = []
    longest = 0
    first = np.where(available.any(axis=0), available.argmax(axis=0), rounds)
    for i in range(clients):
        times = np.flatnonzero(available[:, i])
        if not len(times):
            continue
        gaps.append(np.diff(times))
        # Count the waits at both ends as if every client had participated just before and just after the run.
        longest = max(longest, int(np.diff(np.concatenate([[-1], times, [rounds]])).max()))
    never = int((~available.any(axis=0)).sum())
    return Observed(
        rounds=rounds,
        clients=clients,
        participation=available.mean(axis=0),
        active_per_round=available.sum(axis=1),
        gaps=np.concatenate(gaps) if gaps else np.empty(0, dtype=int),
        tau_max=longest,
        empty_rounds=int((~available.any(axis=1)).sum()),
        never_seen=never,
        all_seen_at=None if never else int(first.max()),
    )
