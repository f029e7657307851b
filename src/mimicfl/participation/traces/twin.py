"""A synthetic twin of a trace, fitted to every device: it can be shared where the trace cannot.

Of each device the twin keeps how long it is available in total, and its habits: at which time of day it is available, and for how long. A
phone that charges through the night stays available for hours at night and for minutes by day; a twin without this has many more clients
per night than the trace, which changes how algorithms rank. The rest is random. Each device's days are shuffled. Its sessions, which
are intervals with short gaps between them, begin an hour or so earlier or later. Intervals and gaps are blurred. Devices are renamed and
shuffled.
"""

import numpy as np

from ...errors import UsageError
from ...seeds import stream
from .intervals import DAY, Trace, around
from .summary import by_hour

SESSION = 3600.0  # intervals with shorter gaps belong together
SHIFT = 3600.0  # standard deviation of the time by which a session begins earlier or later
BLUR = 0.2  # standard deviation of the relative noise of intervals and gaps


def twin(trace: Trace, seed: int = 0) -> Trace:
    """A synthetic trace whose devices have the availability and the habits of those of this one; a seed fixes it."""
    if trace.never.all():
        raise UsageError("no device of the trace is ever available, so there is nothing to fit")
    order = stream(seed, "twin devices").permutation(len(trace))  # the source of each device of the twin
    quiet = float(np.argmin(by_hour(trace))) * DAY / 24  # days are cut where most sessions are over
    device, start, end = around(trace.device, trace.start, trace.end, trace.period)
    kept = end > start
    device, start, end = device[kept], start[kept], end[kept]
    first = np.searchsorted(device, np.arange(len(trace) + 1))
    drawn, clock = [], np.zeros(len(trace))
    for k, source in enumerate(order.tolist()):
        own = slice(first[source], first[source + 1])
        if own.start < own.stop:
            begin, length, clock[k] = _drawn(start[own] - quiet, (end - start)[own], trace.period[source], stream(seed, "twin", source))
            clock[k] += quiet
            drawn.append((np.full(len(begin), k), begin, begin + length))
    numbers, begin, end = (np.concatenate(part) for part in zip(*drawn, strict=True))
    names = [f"device-{k}" for k in range(len(trace))]
    return Trace.of(names, numbers, begin, np.minimum(end, trace.period[order][numbers]), trace.period[order], "the twin", clock)


def _drawn(start: np.ndarray, length: np.ndarray, period: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, float]:
    """Starts and lengths of a device's intervals, drawn again; starts count from the first, whose time is the third value."""
    gap = np.append(start[1:], start[0] + period) - start - length
    opens = np.append(True, gap[:-1] > SESSION)
    session = np.cumsum(opens) - 1
    lasts = np.bincount(session, length + np.where(np.append(opens[1:], True), 0.0, gap))  # [sessions] seconds
    moved = _moved(start[opens] % period, lasts, period, rng)[session]
    order = np.argsort(moved, kind="stable")
    moved, opens, total = moved[order], np.flatnonzero(opens[order]), length.sum()
    length, gap = (each[order] * np.exp(BLUR * rng.standard_normal(len(order))) for each in (length, gap))
    length *= total / length.sum()
    before = _before(length + gap)
    wanted = moved + before - np.repeat(before[opens], np.diff(opens, append=len(order)))
    return _apart(wanted, length, period - total), length, float(wanted[0])


def _moved(start: np.ndarray, lasts: np.ndarray, period: float, rng: np.random.Generator) -> np.ndarray:
    """The new times of a device's sessions: on another day, about the same time of day. An incomplete last day keeps its place."""
    day, days = np.floor(start / DAY).astype(int), int(period // DAY)
    # Sessions that would overlap on shuffled days, as those of a device that is available most of the time, keep the order of their days.
    for to in (rng.permutation(days), (np.arange(days) + rng.integers(max(days, 1))) % max(days, 1)):
        moved = (start + (np.append(to, days)[day] - day) * DAY) % period
        order = np.argsort(moved, kind="stable")
        after = np.append(moved[order][1:], moved[order][0] + period) - (moved + lasts)[order]  # [sessions] seconds before the next
        if (after >= 0).all():
            break
    room = np.empty(len(start))
    room[order] = np.maximum(np.minimum(after, np.roll(after, 1)), 0.0)
    return np.asarray((moved + np.minimum(SHIFT, room / 4) * rng.standard_normal(len(start))) % period)


def _apart(wanted: np.ndarray, length: np.ndarray, spare: float) -> np.ndarray:
    """Starts close to the wanted ones, counted from the first; an interval that would overlap the one before begins a second after it.

    `spare` is the time of the period that is not available: the last interval ends before the first one returns.
    """
    pause = min(1.0, spare / (2 * len(length)))
    used = _before(length + pause)
    free = np.maximum.accumulate(wanted - used)  # unavailable time before each interval
    return np.asarray(used + np.minimum(free - free[0], spare - pause * len(length)))


def _before(values: np.ndarray) -> np.ndarray:
    """The sum of the values before each one."""
    return np.concatenate([[0.0], np.cumsum(values[:-1])])
