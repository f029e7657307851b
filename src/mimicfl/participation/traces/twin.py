"""A synthetic twin of a trace, fitted to every device: it can be shared where the trace cannot.

Of each device the twin keeps for how long it is available in total, how many intervals it has, and the distributions of their lengths and
of the gaps between them. Of the whole trace it keeps the share of devices that are available in each hour of the day. All times are drawn
again: lengths and gaps are perturbed and put in random order. Devices are renamed and shuffled.
"""

import numpy as np

from ...errors import UsageError
from ...seeds import stream
from .intervals import DAY, Trace
from .summary import by_hour

HOURS = 24
PASSES = 8  # of the fit of the hours, which changes little after that
MOST = 0.98  # of the time that a device of the twin is available: without gaps its intervals would be those of the trace
BLUR = 0.1  # standard deviation of the relative noise of intervals and gaps
QUIETEST = 0.02  # rate of new intervals in an hour, relative to the mean: every hour passes


def twin(trace: Trace, seed: int = 0) -> Trace:
    """A synthetic trace with the devices' availability, intervals and gaps, and with the daily cycle of this one; a seed fixes it."""
    devices = np.flatnonzero(~trace.never)
    if not len(devices):
        raise UsageError("no device of the trace is ever available, so there is nothing to fit")
    order = stream(seed, "twin devices").permutation(len(trace))  # number of the source of each device of the twin
    place = np.empty(len(trace), dtype=np.int64)
    place[order] = np.arange(len(trace))
    drawn = _Devices(trace, devices, seed)
    device, start, end = drawn.fitted(by_hour(trace, HOURS) if trace.period.max() >= DAY else np.ones(HOURS))
    names = [f"device-{k}" for k in range(len(trace))]
    return Trace.of(names, place[devices[device]], start, end, trace.period[order], "the twin")


class _Devices:
    """The intervals and gaps of the devices that are ever available, drawn once; their places in time follow from the daily rate."""

    def __init__(self, trace: Trace, devices: np.ndarray, seed: int) -> None:
        kept = trace.lengths > 0
        number = np.full(len(trace), -1)
        number[devices] = np.arange(len(devices))
        of, start, end = number[trace.device[kept]], trace.start[kept], trace.end[kept]
        self.count = np.bincount(of, minlength=len(devices))  # [D] intervals
        self.first = np.cumsum(self.count) - self.count
        self.of, self.period = np.repeat(np.arange(len(devices)), self.count), trace.period[devices]
        self.total = np.minimum(trace.duty[devices], MOST) * self.period  # [D] seconds available
        self.length = self._draw(seed, "twin intervals", end - start, self.total)  # [M]
        after = np.append(start[1:], 0.0)
        last = self.first + self.count - 1
        after[last] = start[self.first] + self.period  # around the end of the trace
        self.gap = self._draw(seed, "twin gaps", np.maximum(after - end, 1.0), self.period - self.total)  # [M] before each interval
        before = self.gap[self.first] * stream(seed, "twin beginnings").random(len(devices))
        self.rest = self.gap[self.first] - before  # [D] the first gap is cut in two; the rest is at the end
        self.gap[self.first] = before

    def _draw(self, seed: int, purpose: str, values: np.ndarray, total: np.ndarray) -> np.ndarray:
        """As many numbers per device as it has values, with the same distribution and with these totals, in random order."""
        rng = stream(seed, purpose)
        log = np.log(values[np.lexsort((values, self.of))])
        first, last = self.first[self.of], (self.first + self.count - 1)[self.of]
        # One number near each quantile, up to half way to the next: many devices have too few values to draw from them at random.
        place = np.clip(np.arange(len(log)) + rng.random(len(log)) - 0.5, first, last)
        low = np.floor(place).astype(np.int64)
        part = place - low
        blurred = (1 - part) * log[low] + part * log[np.minimum(low + 1, last)] + BLUR * rng.standard_normal(len(log))
        found = np.exp(blurred) * (total / np.bincount(self.of, np.exp(blurred)))[self.of]
        return np.asarray(found[np.lexsort((rng.random(len(found)), self.of))])

    def fitted(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Device, start and end of every interval, with this share of devices available in each hour."""
        rate, stretch = np.ones(HOURS), np.ones(len(self.period))
        for _ in range(PASSES):
            clock = _Clock(rate)
            start = self._placed(clock, stretch)
            hours = by_hour(self._trace(start), HOURS)
            rate = np.maximum(rate * (wanted / wanted.mean()) / np.maximum(hours / hours.mean(), QUIETEST), QUIETEST)
            # The clock also runs while a device is available, fast or slow; the gaps take what is left of the period.
            busy = np.bincount(self.of, clock.at(start + self.length) - clock.at(start))
            stretch = np.maximum(clock.at(self.period) - busy - self.rest, 1.0) / np.maximum(self.period - self.total - self.rest, 1.0)
        found = self._trace(self._placed(_Clock(rate), stretch))
        return found.device, found.start, found.end

    def _trace(self, start: np.ndarray) -> Trace:
        """The intervals; where the last one would end after the device's trace, all gaps are shortened by the same factor."""
        total = np.cumsum(self.length)
        earlier = total - self.length - (total[self.first] - self.length[self.first])[self.of]  # [M] seconds available before each
        last = self.first + self.count - 1
        waited = start[last] - earlier[last]
        short = np.minimum(1.0, (self.period - self.total) / np.maximum(waited, 1e-9))[self.of]
        start = short * (start - earlier) + earlier
        end = np.minimum(start + self.length, self.period[self.of])
        start[1:] = np.maximum(start[1:], np.where(self.of[1:] == self.of[:-1], end[:-1], 0.0))  # rounding
        return Trace([""] * len(self.period), np.append(self.first, len(start)), start, np.maximum(end, start), self.period)

    def _placed(self, clock: "_Clock", stretch: np.ndarray) -> np.ndarray:
        """The start of every interval, [M]; gaps are measured by the clock, intervals in seconds."""
        start, now = np.empty(len(self.of)), np.zeros(len(self.period))
        for k in range(int(self.count.max())):
            live = np.flatnonzero(self.count > k)
            row = self.first[live] + k
            begin = clock.time(clock.at(now[live]) + self.gap[row] * stretch[live])
            start[row] = np.maximum(begin, now[live])
            now[live] = start[row] + self.length[row]
        return start


class _Clock:
    """A clock whose rate differs in every hour of the day, and averages one over a day."""

    def __init__(self, rate: np.ndarray) -> None:
        self.reading = np.concatenate([[0.0], np.cumsum(rate)]) * DAY / rate.sum()
        self.seconds = np.arange(HOURS + 1) * DAY / HOURS

    def at(self, time: np.ndarray) -> np.ndarray:
        return np.asarray(np.floor(time / DAY) * DAY + np.interp(time % DAY, self.seconds, self.reading))

    def time(self, reading: np.ndarray) -> np.ndarray:
        return np.asarray(np.floor(reading / DAY) * DAY + np.interp(reading % DAY, self.reading, self.seconds))
