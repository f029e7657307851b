"""The statistics of a trace in words: availability, intervals, gaps, day and night."""

import numpy as np

from ...text import counted
from .intervals import DAY, Trace


def by_hour(trace: Trace, bins: int = 24) -> np.ndarray:
    """The share of devices that are available in each hour of the day, [bins]; 0 in hours that no device's trace covers."""
    found, step = np.zeros(bins), DAY / bins
    for b in range(bins):
        # The time before each point that lies in this part of any day is a staircase.
        start, end, whole = (
            np.floor(t / DAY) * step + np.clip(t % DAY - b * step, 0, step) for t in (trace.start, trace.end, trace.period)
        )
        covered = np.count_nonzero(whole)
        found[b] = np.sum((end - start) / np.maximum(whole, 1e-9)[trace.device]) / max(covered, 1)
    return found


def sentences(trace: Trace) -> list[str]:
    """The statistics as lines of text."""
    duty, lengths = 100 * trace.duty, trace.lengths[trace.lengths > 0]
    days = trace.period / DAY
    span = f"{days.min():.2g} to {days.max():.3g} days" if days.min() < days.max() else f"{days[0]:.3g} days"
    lines = [
        f"{counted(len(trace), 'device')}, {counted(len(trace.start), 'interval')}, traces of {span}",
        f"available {duty.mean():.1f} % of the time on average, median {np.median(duty):.1f} %; {int(trace.never.sum())} devices never",
    ]
    if len(lengths):
        lines.append(f"intervals: median {np.median(lengths):.0f} s, mean {lengths.mean():.0f} s, longest {lengths.max() / 3600:.1f} h")
    gaps = (trace.start[1:] - trace.end[:-1])[trace.device[1:] == trace.device[:-1]]
    if len(gaps):
        lines.append(f"gaps between them: median {np.median(gaps) / 60:.0f} min, mean {gaps.mean() / 3600:.1f} h")
    hours = by_hour(trace)
    if hours.any():
        best, worst = int(hours.argmax()), int(hours.argmin())
        lines.append(
            f"most devices at {best}-{best + 1} h ({100 * hours[best]:.1f} %), fewest at {worst}-{worst + 1} h ({100 * hours[worst]:.1f} %)"
        )
    return lines
