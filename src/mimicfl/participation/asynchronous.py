"""Asynchronous training: clients start and finish at their own times, and the server steps after every K arrivals.

Which clients start when, and which arrive in which server step, depends on the clock alone, not on the model. The whole order of events is
therefore known before the run, and a run is as reproducible and as resumable as a synchronous one.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import UsageError, integer
from ..seeds import stream

MOST_WAITS = 1_000_000  # rounds of the pattern in a row without an arrival


@dataclass(frozen=True, eq=False)
class Arrivals:
    """What each server step aggregates, [T] entries each."""

    clients: list[np.ndarray]  # sorted client numbers, K in every step
    versions: list[np.ndarray]  # the server step before which each of them got its model
    times: np.ndarray  # virtual seconds at which the step happens
    oldest: np.ndarray  # the oldest version that a client is still training with after the step


@dataclass(frozen=True)
class Buffered:
    """K arrivals per server step; at most `concurrency` clients train at once (0: all that are available)."""

    arrivals: int
    concurrency: int = 0

    def check(self, num_clients: int) -> None:
        integer("asynchronous", self.arrivals), integer("concurrency", self.concurrency, low=0)
        if self.arrivals > num_clients:
            raise UsageError(f"asynchronous={self.arrivals} waits for more arrivals than there are clients, {num_clients}; lower it")


def arrivals(
    buffered: Buffered, seconds: np.ndarray, available: Callable[[int], np.ndarray], length: float, steps: int, seed: int
) -> Arrivals:
    """The events of a run.

    seconds     [N] that each client trains
    available   the clients available in a round of the pattern, bool [N]
    length      seconds of such a round

    A client whose update waits in the buffer does not start again before the server has stepped.
    """
    state = _Federation(buffered, seconds, available, length, seed)
    found = [state.step() for _ in range(steps)]
    clients, versions, times, oldest = (list(each) for each in zip(*found, strict=True))
    return Arrivals(clients, versions, np.array(times), np.array(oldest))


class _Federation:
    def __init__(self, buffered: Buffered, seconds: np.ndarray, available: Callable[[int], np.ndarray], length: float, seed: int) -> None:
        self.buffered, self.seconds, self.available, self.length, self.seed = buffered, seconds, available, length, seed
        self.now, self.version, self.tick, self.waited = 0.0, 0, 0, 0
        self.training: list[tuple[float, int, int]] = []  # a heap of (end, client, version)
        self.busy = np.zeros(len(seconds), dtype=bool)  # trains, or waits in the buffer
        self.busy_count = 0
        self.idle, self.idle_at = np.empty(0, dtype=np.int64), (-1, -1)  # clients that may start, and the tick and version for which

    def step(self) -> tuple[np.ndarray, np.ndarray, float, int]:
        """Advance to the next server step."""
        buffer: dict[int, int] = {}
        while len(buffer) < self.buffered.arrivals:
            self._start()
            if not self.training:
                self._wait()
                continue
            if self._free() and self.training[0][0] >= (self.tick + 1) * self.length:
                self._wait()  # clients that become available may start before the next arrival
                continue
            self.now, client, version = heapq.heappop(self.training)
            buffer[client], self.waited = version, 0
        self.busy[list(buffer)] = False
        self.busy_count -= len(buffer)
        self.version += 1
        clients = np.array(sorted(buffer))
        oldest = min((version for _, _, version in self.training), default=self.version)
        return clients, np.array([buffer[client] for client in clients]), self.now, oldest

    def _free(self) -> int:
        limit = self.buffered.concurrency or len(self.seconds)
        return limit - len(self.training)

    def _start(self) -> None:
        """Start as many idle clients as may train, drawn among those available now."""
        self.tick = max(self.tick, int(self.now // self.length))
        if self._free() <= 0:
            return
        if self.idle_at != (self.tick, self.version):  # until then no client becomes available or leaves the buffer
            self.idle, self.idle_at = np.flatnonzero(self.available(self.tick) & ~self.busy), (self.tick, self.version)
        idle = self.idle
        if len(idle) > self._free():
            key = (self.version, self.tick, len(self.training), self.busy_count)
            idle = stream(self.seed, "asynchronous", *key).permutation(idle)[: self._free()]
        for client in idle.tolist():
            self.busy[client] = True
            heapq.heappush(self.training, (self.now + float(self.seconds[client]), client, self.version))
        self.busy_count += len(idle)
        self.idle = self.idle[~self.busy[self.idle]]

    def _wait(self) -> None:
        """Go to the next round of the pattern."""
        self.tick += 1
        self.now = max(self.now, self.tick * self.length)
        self.waited += 1
        if self.waited > MOST_WAITS:
            raise UsageError(f"no client arrives in {MOST_WAITS:,} rounds of the availability pattern; choose another, or fewer arrivals")
