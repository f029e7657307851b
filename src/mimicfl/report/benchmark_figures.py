"""Figures of the benchmark: means with intervals, curves, and the critical-difference diagram."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ..benchmark.analysis import Table
from ..significance import Paired, Ranking
from .figures import INK
from .styles import color_of, title_of


def _title(table: Table) -> str:
    """The pattern, and how many of the algorithms are drawn if not all are complete."""
    shown, known = len(table.order), len(table.entries)
    return table.pattern.name + ("" if shown == known else f" ({shown} of {known})")


def means(tables: Sequence[Table]) -> Figure:
    """The mean over the last tenth of every algorithm under every pattern, with 95 % intervals over seeds."""
    rows = math.ceil(len(tables) / 4)
    figure = Figure(figsize=(11, 2.9 * rows), layout="constrained")
    for k, table in enumerate(tables):
        axes = figure.add_subplot(rows, 4, k + 1)
        names = table.order[::-1]
        for y, name in enumerate(names):
            found = Paired.of(list(table.entries[name].by_seed().values()))
            low, high = found.interval()
            axes.plot([low, high], [y, y], color=color_of(name), linewidth=2)
            axes.plot(found.mean, y, "o", color=color_of(name), ms=6, mfc=color_of(name) if name in table.best else "white")
        axes.set_yticks(range(len(names)), [title_of(name) for name in names], fontsize=8)
        axes.set_title(_title(table), fontsize=10, color=INK, loc="left")
        axes.grid(color="#dddddd", linewidth=0.6, axis="x")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(labelsize=8, left=False)
    figure.supxlabel("test accuracy (%)", fontsize=9)
    return figure


def curves(tables: Sequence[Table]) -> Figure:
    """Mean accuracy over the seeds against rounds, one panel per pattern."""
    rows = math.ceil(len(tables) / 4)
    figure = Figure(figsize=(11, 2.7 * rows + 0.4), layout="constrained")
    lines = {}
    for k, table in enumerate(tables):
        axes = figure.add_subplot(rows, 4, k + 1)
        for name in table.order:
            found = [run["curve"] for run in table.entries[name].runs if "curve" in run]
            length = min(map(len, found), default=0)
            if length:
                x = (np.arange(length) + 1) * int(table.part.settings.get("eval_every", 1))
                mean = np.array([curve[:length] for curve in found]).mean(axis=0) / 10
                lines[name] = axes.plot(x, mean, color=color_of(name), linewidth=1.4)[0]
        axes.set_title(_title(table), fontsize=10, color=INK, loc="left")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.legend(lines.values(), [title_of(name) for name in lines], loc="outside upper center", ncols=8, frameon=False, fontsize=8)
    figure.supylabel("test accuracy (%)", fontsize=9)
    figure.supxlabel("round", fontsize=9)
    return figure


def critical_difference(found: Ranking) -> Figure:
    """Mean ranks on a line; a bar joins algorithms that the Nemenyi test does not distinguish."""
    bars, names = found.groups(), list(found.ranks)
    figure = Figure(figsize=(8, 1.3 + 0.2 * len(names) + 0.16 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    for k, bar in enumerate(bars):
        axes.plot([found.ranks[bar[0]] - 0.04, found.ranks[bar[-1]] + 0.04], [-0.35 - 0.3 * k] * 2, color=INK, linewidth=3)
    below = -0.6 - 0.3 * len(bars)
    for k, name in enumerate(names):
        left = k < (len(names) + 1) // 2
        y = below - 0.45 * (k if left else len(names) - 1 - k)
        x = 0.6 if left else len(names) + 0.4
        axes.plot([found.ranks[name]] * 2 + [x], [0, y, y], color=color_of(name), linewidth=1)
        text = f"{title_of(name)} {found.ranks[name]:.1f}"
        axes.text(x, y, f"{text}  " if left else f"  {text}", ha="right" if left else "left", va="center", fontsize=9, color=INK)
    axes.plot([1, len(names)], [0, 0], color=INK, linewidth=1)
    axes.set_xticks(range(1, len(names) + 1))
    axes.xaxis.tick_top()
    axes.set_yticks([])
    axes.set_xlim(-0.6, len(names) + 1.6)
    axes.spines[["top", "bottom", "left", "right"]].set_visible(False)
    axes.set_title(f"mean rank (1 is best) over {found.cells} cells; critical difference {found.critical:.2f}", fontsize=9, color=INK)
    return figure
