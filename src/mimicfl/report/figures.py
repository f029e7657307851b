"""Figures: learning curves and client availability. The file extension selects PNG, SVG or PDF."""

import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import UsageError
from ..files import replacing
from ..metrics.columns import percent
from ..metrics.history import History
from ..tasks.metrics import higher_is_better
from ..text import visible
from .columns import axis as axis_name
from .curves import AXES, EARLY
from .styles import Dash
from .summary import Group, algorithm_title, by_setting, colors_of, default_axis, group, main_metric

INK, PRESENT, ABSENT = "#30363d", "#2a6f97", "#edf2f4"
HEIGHT, LINE = 4.6, 0.19  # inches: the curves, and a line of the legend below them
MOST_INSIDE, LONGEST_INSIDE = 6, 24  # labels and characters per label that fit inside the axes
ABREAST, HANDLE = 118, 10  # characters per line of the legend, and the width of a line sample
MOST_IN_ONE, PANELS_ABREAST, PANEL_LINE = 8, 3, 46  # curves in one chart, panels side by side, and characters per line of their titles
LONGEST_NAME = 160  # characters of a name in a figure; the page shows the full name


def curves(runs: Sequence[History] | Sequence[Group], axis: str = "uploads", heading: str = "") -> Figure:
    """One line per algorithm, mean over seeds, with a band of one standard deviation."""
    groups: list[Group] = [g for g in runs if isinstance(g, Group)] or group([h for h in runs if isinstance(h, History)])
    metric = main_metric(groups)
    factor = 100 if percent(metric) else 1
    figure = Figure(figsize=(8, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    early = False
    for g in groups:
        curve = g.curve(metric, axis)
        early = early or curve.early
        x, mean, std = np.array(curve.x), factor * np.array(curve.mean), factor * np.array(curve.std)
        width, order = (2.4, 3) if g.emphasized else (1.5, 2)
        axes.plot(x, mean, linestyle=dashes(g), color=g.color, label=literal(g.label), linewidth=width, zorder=order)
        axes.fill_between(x, mean - std, mean + std, color=g.color, alpha=0.15, linewidth=0)
    if metric == "distance":
        axes.set_yscale("log")
    axes.set_xlabel(AXES[axis] + f"\n{EARLY}" * early)
    axes.set_ylabel(axis_name(metric))
    heading = ", ".join([heading, *(_spread(groups) or ["one seed"])]) if heading else subtitle(groups)
    axes.set_title(literal(heading), fontsize=10, color=INK, loc="left")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    if fit_inside(groups):
        axes.legend(frameon=False, loc="lower right" if higher_is_better(metric) else "upper right")
    else:
        legend_below(figure, axes)
    return figure


def fit_inside(groups: Sequence[Group]) -> bool:
    """Whether a legend of these groups fits inside the axes."""
    return len(groups) <= MOST_INSIDE and max((len(g.label) for g in groups), default=0) <= LONGEST_INSIDE


def legend_below(figure: Figure, axes: Axes) -> None:
    """Draw the legend of these axes below all axes of the figure, which grows accordingly."""
    lines, labels = axes.get_legend_handles_labels()
    columns = max(1, ABREAST // (max(map(len, labels), default=0) + HANDLE))
    figure.set_figheight(figure.get_figheight() + LINE * math.ceil(len(labels) / columns))
    figure.legend(lines, labels, frameon=False, loc="outside lower left", ncols=columns, fontsize=9, handlelength=4)


def overview(groups: Sequence[Group]) -> Figure:
    """The curves in one chart, or in panels if there are too many."""
    panels = len(groups) > MOST_IN_ONE and len(by_setting(groups)) > 1
    return (facets if panels else curves)(groups, default_axis(groups))


def facets(groups: Sequence[Group], axis: str = "uploads") -> Figure:
    """One panel per setting, one colour per algorithm: a sweep has too many curves for one chart."""
    settings = by_setting(groups)
    metric, colors = main_metric(groups), colors_of(groups)
    factor = 100 if percent(metric) else 1
    columns = min(PANELS_ABREAST, len(settings))
    rows = math.ceil(len(settings) / columns)
    figure = Figure(figsize=(3.3 * columns, 2.5 * rows + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    early = False
    for k, (setting, rivals) in enumerate(settings.items()):
        axes = panels[k // columns, k % columns]
        for g in rivals:
            curve, name = g.curve(metric, axis), algorithm_title(g)
            early = early or curve.early
            x, mean, std = np.array(curve.x), factor * np.array(curve.mean), factor * np.array(curve.std)
            axes.plot(x, mean, color=colors[name], label=literal(name), linewidth=2.2 if g.emphasized else 1.4)
            axes.fill_between(x, mean - std, mean + std, color=colors[name], alpha=0.15, linewidth=0)
        if metric == "distance":
            axes.set_yscale("log")
        axes.set_title("\n".join(folded(literal(setting), PANEL_LINE)), fontsize=8, color=INK, loc="left")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels.flat[len(settings) :]:
        axes.set_visible(False)
    figure.supxlabel(AXES[axis] + f"\n{EARLY}" * early, fontsize=9)
    figure.supylabel(axis_name(metric), fontsize=9)
    found = {line.get_label(): line for axes in panels.flat for line in axes.get_lines()}
    figure.legend(found.values(), found.keys(), frameon=False, loc="outside upper center", ncols=min(5, len(found)), fontsize=9)
    return figure


def dashes(g: Group) -> str | Dash:
    """The line style of a group in matplotlib's format."""
    return g.dash if g.dash[1] else "-"


def subtitle(groups: Sequence[Group]) -> str:
    """The dataset, the number of clients and seeds, and the availability pattern if all runs share it."""
    config = groups[0].runs[0].config if groups else {}
    if not config:
        return ""
    clients = f"{config['num_clients']} clients" if config.get("num_clients") else ""
    words = [*filter(None, [str(config.get("dataset", "")), clients]), *_spread(groups)]
    patterns = {str(run.config.get("availability") or "") for g in groups for run in g.runs}
    return ", ".join(words) + (f"\n{pattern}" if len(patterns) == 1 and (pattern := patterns.pop()) else "")


def _spread(groups: Sequence[Group]) -> list[str]:
    """The meaning of lines and bands if there is more than one seed, else nothing."""
    least, most = min(len(g.runs) for g in groups), max(len(g.runs) for g in groups)
    return [f"mean ± std of {most if least == most else f'{least} to {most}'} seeds"] * (most > 1)


def schedule_words(config: dict[str, Any], named: bool = True) -> list[str]:
    """The availability pattern, if `named` and known, and the seed of a schedule."""
    words = [str(config["availability"])] if named and config.get("availability") else []
    return [*words, f"seed {config['seed']}"] if "seed" in config else words


def availability(available: np.ndarray, title: str = "", each: str = "client") -> Figure:
    """Client availability: one row per client, one column per round, dark where active; at the right, the participation rates."""
    rounds, clients = available.shape
    figure = Figure(figsize=(9, min(10, max(2.2, 0.11 * clients + 1.2))), layout="constrained")
    grid = figure.add_gridspec(1, 2, width_ratios=[8, 1])
    left = figure.add_subplot(grid[0])
    palette = np.array([[int(c[k : k + 2], 16) for k in (1, 3, 5)] for c in (ABSENT, PRESENT)], dtype=np.uint8)
    left.imshow(palette[available.T.astype(int)], aspect="auto", interpolation="nearest", extent=(-0.5, rounds - 0.5, clients - 0.5, -0.5))
    left.set_xlabel("round")
    left.set_ylabel(each)
    left.set_title(literal(title), fontsize=10, color=INK, loc="left")
    right = figure.add_subplot(grid[1], sharey=left)
    right.barh(np.arange(clients), 100 * available.mean(axis=0), color=PRESENT, height=0.8)
    right.set_xlabel("% of rounds")
    right.tick_params(labelleft=False)
    right.spines[["top", "right"]].set_visible(False)
    return figure


def class_table(found: Sequence[object]) -> np.ndarray:
    """Accuracies by class, [rows, classes], as an array; None becomes NaN. Raises `UsageError` if the rows are damaged."""
    try:
        table = np.array(found, dtype=float)
    except (TypeError, ValueError, OverflowError):
        table = np.empty(0)
    if table.ndim != 2:
        raise UsageError(f"class_accuracy must be a list with one number per class in every row, got {str(found)[:60]}")
    return table


def save(figure: Figure, path: Path) -> Path:
    """Write a figure atomically; the extension (.png, .svg, .pdf) selects the format."""
    with replacing(path) as partial:
        render(figure, partial, path.suffix.lstrip("."), dpi=150)
    return path


def render(figure: Figure, target: Path | BinaryIO, kind: str, dpi: int) -> None:
    """Draw a figure without warnings about characters that the font lacks; the page shows the full names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        warnings.filterwarnings("ignore", message="constrained_layout not applied")  # caused by very long names
        figure.savefig(target, format=kind, dpi=dpi)


def folded(text: str, most: int) -> list[str]:
    """Lines of at most `most` characters, broken after spaces and commas where possible."""
    lines = [""]
    for part in re.findall(rf"[^ ,]{{0,{most - 1}}}[ ,]|[^ ,]{{1,{most}}}", text):
        if lines[-1] and len((lines[-1] + part).rstrip()) > most:
            lines.append("")
        lines[-1] += part
    return [line.strip() for line in lines]


def literal(text: str) -> str:
    """Escape text so that matplotlib shows it literally: a pair of dollar signs would start a formula."""
    shown = visible(text)
    return (shown if len(shown) <= LONGEST_NAME else shown[: LONGEST_NAME - 1] + "…").replace("$", r"\$")
