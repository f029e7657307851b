"""Pictures: accuracy against uploads, and who was there when. PNG or SVG by the file's ending."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from matplotlib.figure import Figure

from ..errors import UsageError
from ..files import replacing
from ..metrics.history import History
from ..text import visible
from .styles import Dash
from .summary import AXES, METRICS, Group, group, main_metric

INK, PRESENT, ABSENT = "#30363d", "#2a6f97", "#edf2f4"
HEIGHT, LINE = 4.6, 0.19  # inches: of the curves, and of a line of the legend below them
MOST_INSIDE, LONGEST_INSIDE = 6, 24  # labels, and letters of a label, that leave the curves visible
ABREAST, HANDLE = 118, 10  # letters in a line of the legend, and the room of a piece of line beside its label
LONGEST_NAME = 160  # characters of a name in a picture; the page has all of it


def curves(runs: Sequence[History] | Sequence[Group], axis: str = "uploads", heading: str = "") -> Figure:
    """One line per algorithm, mean over seeds, with a band of one standard deviation."""
    groups: list[Group] = [g for g in runs if isinstance(g, Group)] or group([h for h in runs if isinstance(h, History)])
    metric = main_metric(groups)
    factor = 100 if metric == "test_accuracy" else 1
    figure = Figure(figsize=(8, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    for g in groups:
        curve = g.curve(metric, axis)
        x, mean, std = np.array(curve.x), factor * np.array(curve.mean), factor * np.array(curve.std)
        own = g.label.startswith("MimiC")
        width, order = (2.4, 3) if own else (1.5, 2)
        axes.plot(x, mean, linestyle=dashes(g), color=g.color, label=literal(g.label), linewidth=width, zorder=order)
        axes.fill_between(x, mean - std, mean + std, color=g.color, alpha=0.15, linewidth=0)
    if metric == "distance":
        axes.set_yscale("log")
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel(METRICS[metric])
    heading = ", ".join([heading, *(_spread(groups) or ["one seed"])]) if heading else subtitle(groups)
    axes.set_title(literal(heading), fontsize=10, color=INK, loc="left")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    longest = max((len(g.label) for g in groups), default=0)
    if len(groups) <= MOST_INSIDE and longest <= LONGEST_INSIDE:
        axes.legend(frameon=False, loc="lower right" if metric == "test_accuracy" else "upper right")
    else:  # below the picture, which grows by as much
        columns = max(1, ABREAST // (longest + HANDLE))
        figure.set_figheight(HEIGHT + LINE * math.ceil(len(groups) / columns))
        figure.legend(frameon=False, loc="outside lower left", ncols=columns, fontsize=9, handlelength=4)
    return figure


def dashes(g: Group) -> str | Dash:
    """As matplotlib wants them."""
    return g.dash if g.dash[1] else "-"


def subtitle(groups: Sequence[Group]) -> str:
    config = groups[0].runs[0].config if groups else {}
    if not config:
        return ""
    words = [str(config.get("dataset", "")), f"{config.get('num_clients')} clients", *_spread(groups)]
    patterns = {str(run.config.get("availability")) for g in groups for run in g.runs}
    return ", ".join(words) + (f"\n{patterns.pop()}" if len(patterns) == 1 else "")


def _spread(groups: Sequence[Group]) -> list[str]:
    """What lines and bands are, where there is more than one seed."""
    least, most = min(len(g.runs) for g in groups), max(len(g.runs) for g in groups)
    return [f"mean ± std of {most if least == most else f'{least} to {most}'} seeds"] * (most > 1)


def availability(available: np.ndarray, title: str = "") -> Figure:
    """Clients down, rounds across, dark where a client was there; at the right, how often."""
    rounds, clients = available.shape
    figure = Figure(figsize=(9, min(10, max(2.2, 0.11 * clients + 1.2))), layout="constrained")
    grid = figure.add_gridspec(1, 2, width_ratios=[8, 1])
    left = figure.add_subplot(grid[0])
    palette = np.array([[int(c[k : k + 2], 16) for k in (1, 3, 5)] for c in (ABSENT, PRESENT)], dtype=np.uint8)
    left.imshow(palette[available.T.astype(int)], aspect="auto", interpolation="nearest", extent=(-0.5, rounds - 0.5, clients - 0.5, -0.5))
    left.set_xlabel("round")
    left.set_ylabel("client")
    left.set_title(literal(title), fontsize=10, color=INK, loc="left")
    right = figure.add_subplot(grid[1], sharey=left)
    right.barh(np.arange(clients), 100 * available.mean(axis=0), color=PRESENT, height=0.8)
    right.set_xlabel("% of rounds")
    right.tick_params(labelleft=False)
    right.spines[["top", "right"]].set_visible(False)
    return figure


def class_table(found: Sequence[object]) -> np.ndarray:
    """Accuracies by class, [rows, classes], read from files: None if a class has no test sample."""
    try:
        table = np.array(found, dtype=float)
    except (TypeError, ValueError, OverflowError):
        table = np.empty(0)
    if table.ndim != 2:
        raise UsageError(f"class_accuracy must be a list with one number per class in every row, got {str(found)[:60]}")
    return table


def save(figure: Figure, path: Path) -> Path:
    """Write a picture whole; the ending (.png, .svg, .pdf) chooses the format."""
    with replacing(path) as partial:
        render(figure, partial, path.suffix.lstrip("."), dpi=150)
    return path


def render(figure: Figure, target: Path | BinaryIO, kind: str, dpi: int) -> None:
    """Draw a picture, without warnings about characters that the font lacks: the page shows the name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        warnings.filterwarnings("ignore", message="constrained_layout not applied")  # of very long names
        figure.savefig(target, format=kind, dpi=dpi)


def literal(text: str) -> str:
    """Text that matplotlib shows literally: a pair of dollar signs would start a formula."""
    shown = visible(text)
    return (shown if len(shown) <= LONGEST_NAME else shown[: LONGEST_NAME - 1] + "…").replace("$", r"\$")
