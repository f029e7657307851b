"""The figures of docs/availability.md.

python docs/availability_figures.py        # a few seconds
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import mimicfl as mf
from mimicfl.participation.traces.summary import by_hour

FIGURES = Path(__file__).parent / "pictures"
DAY = 86_400
GALLERY = [
    "static:0.2",
    "time-varying:0.2",
    "bounded:20",
    "markov:0.05,0.2",
    "cyclic:20,4",
    "label-correlated:classes=[0,1],rare=0.05,common=0.4",
    "dirichlet:0.5,mean=0.2",
    "lognormal:1,mean=0.2",
    "sine:0.5",
    "interleaved-sine:0.3,alpha=1",
    "staircase:0.5",
    "outages:5",
    "circles:5,on=3",
    "diurnal:round=1800",
]


def gallery() -> Figure:
    """Every pattern: one row per client, one column per round, dark where available."""
    counts = np.eye(10, dtype=int)[np.arange(30) % 10] * 10
    figure = Figure(figsize=(10, 9), layout="constrained")
    for axes, spec in zip(figure.subplots(5, 3).flat, [*GALLERY, None], strict=True):
        axes.set_axis_off()
        if spec is None:
            continue
        available = mf.availability.schedule(spec, 100, 30, 0, counts)
        axes.imshow(available.T, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1.3)
        axes.set_title(f"{spec}   {100 * available.mean():.0f} %", fontsize=8, loc="left", family="monospace")
    return figure


def a_week() -> Figure:
    """A week of `diurnal`: who is available when, and the share of devices by hour of the day."""
    pattern = mf.availability.Diurnal(round=900)
    trace = pattern.trace(7 * DAY, 60, 0)
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    order = np.argsort(-trace.duty, kind="stable")
    available = mf.availability.schedule(pattern, 7 * 96, 60, 0)[:, order]
    left.imshow(available.T, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1.3, extent=(0, 7, 60, 0))
    left.set(xlabel="day", ylabel="device, most available first", title="diurnal: a week of 60 devices")
    hours = 100 * by_hour(pattern.trace(7 * DAY, 2000, 0))
    right.bar(np.arange(24) + 0.5, hours, color="#3b6ea5")
    right.set(xlabel="hour of the day", ylabel="% of the devices", xlim=(0, 24), title="available, by hour")
    right.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    for name, draw in (("availability-patterns", gallery), ("availability-diurnal", a_week)):
        draw().savefig(FIGURES / f"{name}.png", dpi=130)
