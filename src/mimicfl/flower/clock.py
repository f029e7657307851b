"""Time for the round loop: the machine's clock on a network, virtual time in an in-process federation."""

import itertools
import math
import time
from collections.abc import Callable

from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid

from ..errors import UsageError


class Clock:
    """The machine's clock; `wait` returns every `poll` seconds, so that the caller can poll for replies."""

    def __init__(self, poll: float) -> None:
        self.poll = poll

    def now(self) -> float:
        return time.monotonic()

    def wait(self, until: float = math.inf) -> bool:
        """Wait until there may be new replies, at most until `until`; returns False if that time has already passed."""
        left = until - self.now()
        if left > 0:
            time.sleep(min(self.poll, left))
        return left > 0


class VirtualClock(Clock):
    """Virtual time: it passes only while the server waits, and jumps to the next event or to the deadline.

    Training takes no virtual time, so a client misses a deadline only if its reply is delayed or never sent, even on a busy
    machine. Waiting for a deadline takes no real time.
    """

    def __init__(self) -> None:
        super().__init__(poll=0.0)
        self._now, self._numbers = 0.0, itertools.count()
        self._events: dict[int, tuple[float, Callable[[], None]]] = {}

    def now(self) -> float:
        return self._now

    def after(self, seconds: float, action: Callable[[], None]) -> int:
        """Call `action` after this many seconds; the returned number cancels it."""
        number = next(self._numbers)
        self._events[number] = (self._now + seconds, action)
        return number

    def cancel(self, number: int) -> None:
        self._events.pop(number, None)

    def wait(self, until: float = math.inf) -> bool:
        if until <= self._now:
            return False
        moment = min([until, *(due for due, _ in self._events.values())])
        if moment == math.inf:
            raise UsageError("the server waits for clients, but no client has a reply to send; lower wait_for or set patience")
        self._now = moment
        for number in [number for number, (due, _) in self._events.items() if due <= moment]:
            if number in self._events:  # not cancelled by another event
                self._events.pop(number)[1]()
        return True


def clock_of(grid: Grid, poll: float | None) -> Clock:
    """The clock of the grid if it has one, else the machine's."""
    found = getattr(grid, "clock", None)
    if isinstance(found, Clock):
        return found
    return Clock(poll or (0.02 if isinstance(grid, InMemoryGrid) else 0.2))
