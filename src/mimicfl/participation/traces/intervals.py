"""`Trace`: when each device was available, as intervals in seconds.

25 million intervals of 100,000 devices take 400 MB: two numbers per interval, and one offset, period and name per device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...errors import UsageError

DAY = 86_400.0
MOST_SECONDS = 1e12  # of a trace, and of one that is repeated: later times are no longer exact


@dataclass(frozen=True, eq=False)
class Trace:
    """The intervals of all devices, sorted by device and start; they do not overlap. Times count from the start of each device's trace.

    Build it with `Trace.of`, which sorts and checks.
    """

    names: list[str]  # [D]
    offsets: np.ndarray  # [D + 1] the intervals of device i are offsets[i] to offsets[i + 1]
    start: np.ndarray  # [M]
    end: np.ndarray  # [M]
    period: np.ndarray  # [D] length of each device's trace; it may be repeated after this time

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        device: np.ndarray,
        start: np.ndarray,
        end: np.ndarray,
        period: np.ndarray,
        where: str,
        clock: np.ndarray | None = None,
    ) -> "Trace":
        """A trace from unsorted intervals; `device` numbers the names. Refuses what cannot be a trace, and says where it was found.

        `clock` [D] is the time of day at which each device's trace starts: traces are turned around so that time 0 is midnight for all.
        """
        if not len(names):
            raise UsageError(f"{where} is empty: it must contain at least one device")
        period = np.asarray(period, dtype=float)
        device, start, end = np.asarray(device), np.asarray(start, dtype=float), np.asarray(end, dtype=float)
        if len(start) and not (_ordered(device, start)):
            order = np.lexsort((start, device))
            device = device[order]  # one after another: each frees its unsorted form
            start = start[order]
            end = end[order]
            del order
        _check(names, device, start, end, period, where)
        if clock is not None:
            device, start, end = _turned(device, start, end, period, np.asarray(clock, dtype=float))
        return cls(list(names), np.searchsorted(device, np.arange(len(names) + 1)), start, end, period)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def device(self) -> np.ndarray:
        """[M] the device of each interval."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.offsets))

    @property
    def lengths(self) -> np.ndarray:
        return np.asarray(self.end - self.start)

    @cached_property
    def duty(self) -> np.ndarray:
        """[D] the share of time that each device is available."""
        total = np.concatenate([[0.0], np.cumsum(self.lengths)])
        return np.asarray((total[self.offsets[1:]] - total[self.offsets[:-1]]) / self.period)

    @property
    def never(self) -> np.ndarray:
        """[D] True for devices that are never available; an interval of length 0 does not count."""
        return np.asarray(self.duty == 0)

    def take(self, devices: np.ndarray) -> "Trace":
        """The trace of these devices, in this order; a device may occur several times."""
        counts = np.diff(self.offsets)[devices]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        rows = np.repeat(self.offsets[:-1][devices] - offsets[:-1], counts) + np.arange(offsets[-1])
        names = [self.names[i] for i in devices]
        return Trace(names, offsets, self.start[rows], self.end[rows], self.period[devices])


def _ordered(device: np.ndarray, start: np.ndarray) -> bool:
    same = device[1:] == device[:-1]
    return bool(((device[1:] > device[:-1]) | (same & (start[1:] >= start[:-1]))).all())


def _check(names: Sequence[str], device: np.ndarray, start: np.ndarray, end: np.ndarray, period: np.ndarray, where: str) -> None:
    def refuse(bad: np.ndarray, what: str) -> None:
        if bad.any():
            k = int(bad.argmax())
            raise UsageError(f"{where}: device {names[device[k]]} {what.format(start[k], end[k])}")

    if not (np.isfinite(period) & (period > 0)).all():
        k = int(np.argmin(np.isfinite(period) & (period > 0)))
        raise UsageError(f"{where}: the period of device {names[k]} must be above 0 seconds, got {period[k]:g}")
    if (period > MOST_SECONDS).any():
        k = int(period.argmax())
        raise UsageError(f"{where}: the period of device {names[k]} must be at most {MOST_SECONDS:.0e} seconds, got {period[k]:g}")
    refuse(~(np.isfinite(start) & np.isfinite(end)), "has an interval from {:g} to {:g}; times must be numbers of seconds")
    refuse(end < start, "has an interval that ends before it starts, from {:g} to {:g}; exchange the two")
    refuse(start < 0, "has an interval from {:g} to {:g}, which begins before the start of the trace; times count from 0")
    refuse(end > period[device], "has an interval from {:g} to {:g}, which ends after the trace's period; raise the period")
    overlaps = np.zeros(len(start), dtype=bool)
    overlaps[1:] = (device[1:] == device[:-1]) & (start[1:] < end[:-1])
    refuse(overlaps, "has an interval from {:g} to {:g} that overlaps the one before; merge them")


def _turned(device: np.ndarray, start: np.ndarray, end: np.ndarray, period: np.ndarray, by: np.ndarray) -> tuple[np.ndarray, ...]:
    """Shift each device's intervals by a time, modulo its period; an interval that crosses the end is cut in two."""
    length, span = end - start, period[device]
    start = (start + by[device]) % span
    over = np.maximum(start + length - span, 0)
    cut = over > 0
    parts = ((device, device[cut]), (start, np.zeros(int(cut.sum()))), (start + length - over, over[cut]))
    device, start, end = (np.concatenate(part) for part in parts)
    order = np.lexsort((start, device))
    return device[order], start[order], np.minimum(end[order], period[device[order]])


def merged(device: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join sorted intervals of a device that touch."""
    if not len(start):
        return device, start, end
    begins = np.ones(len(start), dtype=bool)
    begins[1:] = (device[1:] != device[:-1]) | (start[1:] > end[:-1])
    ends = np.append(begins[1:], True)
    return device[begins], start[begins], end[ends]


def around(device: np.ndarray, start: np.ndarray, end: np.ndarray, period: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join the last interval of a device with its first if they touch when the trace is repeated; the result may end after the period."""
    first = np.ones(len(device), dtype=bool)
    first[1:] = device[1:] != device[:-1]
    last = np.append(first[1:], True)[: len(device)]
    begins, ends = np.flatnonzero(first), np.flatnonzero(last)
    joined = (begins != ends) & (start[begins] == 0) & (end[ends] == period[device[ends]])
    end = end.copy()
    end[ends[joined]] += end[begins[joined]]
    kept = np.ones(len(device), dtype=bool)
    kept[begins[joined]] = False
    return device[kept], start[kept], end[kept]
