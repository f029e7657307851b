"""The paper's figures drawn from our records, and its tables as figures of published and our results."""

import re
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..paper.records import Records
from ..paper.reproduce import Cell
from ..paper.study import Study
from .figures import INK, curves
from .paper_values import runs_of, value
from .styles import color_of
from .summary import Group, title, with_seeds_in_common


def draw(study: Study, records: Records, seeds: Sequence[int]) -> dict[str, Figure]:
    """The figures of a study by name, without those that have no runs yet."""
    found: dict[str, Figure] = {}
    if study.drawn == "curves":
        for column in study.columns:
            groups: Sequence[Group] = [group for a in study.algorithms if (group := runs_of(Cell(study, column, a), records, seeds))]
            if groups:
                groups, _ = with_seeds_in_common(groups, "test_accuracy")  # means over different seeds cannot be compared
                suffix = f"-{'-'.join(re.findall(r'[a-z0-9.]+', column))}" if len(study.columns) > 1 else ""
                found[study.name + suffix] = curves(groups, heading=f"{study.title}, {study.place(column)}")
    elif study.drawn == "against" and (figure := _against(study, records, seeds)):
        found[study.name] = figure
    if len(study.columns) > 1 and study.published and (figure := _beside(study, records, seeds)):
        found[f"{study.name}-beside"] = figure
    return found


def _axes(figure: Figure, study: Study) -> Axes:
    axes = figure.add_subplot()
    axes.set_ylabel("test accuracy (%)")
    axes.set_title(study.title, fontsize=10, color=INK, loc="left")
    axes.grid(color="#dddddd", linewidth=0.6, axis="y")
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _against(study: Study, records: Records, seeds: Sequence[int]) -> Figure | None:
    """Final accuracy against the value that the columns vary."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = _axes(figure, study)
    columns = [float(c) for c in study.columns]
    aside = 0.006 * (max(columns) - min(columns))  # separates error bars at the same x
    lines = 0
    for i, algorithm in enumerate(study.algorithms):
        points = [(float(c), v) for c in study.columns if (v := value(Cell(study, c, algorithm), records, seeds))]
        if len(points) > 1:
            places, values = zip(*points, strict=True)
            spread = [v.std or 0.0 for v in values]
            x = [place + (i - (len(study.algorithms) - 1) / 2) * aside for place in places]
            style: dict[str, Any] = {"color": color_of(algorithm), "label": title(algorithm), "marker": "o", "capsize": 3}
            axes.errorbar(x, [v.mean for v in values], yerr=spread, **style)
            lines += 1
    if not lines:
        return None
    axes.set_xlabel(study.head)
    axes.legend(frameon=False, loc="lower right")
    return figure


def _beside(study: Study, records: Records, seeds: Sequence[int]) -> Figure | None:
    """Published accuracies (hollow) beside ours (filled, with a bar of one standard deviation)."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = _axes(figure, study)
    step, drawn = 1.0 / (len(study.algorithms) + 2), False
    for i, algorithm in enumerate(study.algorithms):
        for k, column in enumerate(study.columns):
            x = k + (i - (len(study.algorithms) - 1) / 2) * step
            if printed := study.published[algorithm].get(column):
                axes.plot(x - step / 6, printed[0], "o", mfc="white", mec=color_of(algorithm), ms=7)
            if found := value(Cell(study, column, algorithm), records, seeds):
                drawn = True
                axes.errorbar(x + step / 6, found.mean, yerr=found.std or 0.0, fmt="o", color=color_of(algorithm), ms=7, capsize=2)
        axes.plot([], [], "o", color=color_of(algorithm), label=title(algorithm))
    axes.plot([], [], "o", mfc="white", mec="#666666", label="published")
    axes.set_xticks(range(len(study.columns)), [study.place(column) for column in study.columns])
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure if drawn else None
