"""The comparison as a terminal table."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from .gap import mean_std
from .summary import BEST, LEVEL, Group, higher_is_better, main_metric, marks, show

HEADS = {"test_accuracy": "test accuracy", "test_loss": "test loss", "distance": "distance to optimum"}


@dataclass(frozen=True)
class Line:
    """One row of the table, as text."""

    label: str
    final: str
    extreme: str  # the best point of each run, averaged
    swing: str
    seeds: int
    rounds: str
    uploads: str
    megabytes: str
    mark: str  # BEST, LEVEL or nothing


def lines(groups: Sequence[Group]) -> list[Line]:
    metric = main_metric(groups)
    return [_line(g, metric, mark) for g, mark in zip(groups, marks(groups, metric), strict=True)]


def _line(g: Group, metric: str, mark: str) -> Line:
    values = [[row[metric] for row in run.rows if row.get(metric) is not None] for run in g.runs]
    pick = max if higher_is_better(metric) else min
    extreme, _ = mean_std([pick(v) for v in values if v])
    shake = g.swing(metric)
    ends = [run.rows[-1] for run in g.runs if run.rows]
    return Line(
        label=g.label,
        final=show(metric, *mean_std(g.finals(metric))),
        extreme=show(metric, extreme),
        swing="–" if shake is None else (f"{100 * shake:.1f}" if metric == "test_accuracy" else f"{shake:.2g}"),
        seeds=len(g.runs),
        rounds=_span([end["round"] + 1 for end in ends]),
        uploads=_span([end["uploads"] for end in ends]),
        megabytes=f"{mean_std([end['bytes_up'] / 1e6 for end in ends])[0]:.3g}",
        mark=mark,
    )


def extreme_word(metric: str) -> str:
    return "peak" if higher_is_better(metric) else "lowest"


def _span(values: list[int]) -> str:
    if not values:
        return "0"
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}-{max(values)}"


def table(groups: Sequence[Group]) -> Table:
    """Mean ± standard deviation over seeds; the best is marked, or those between whom there is no best."""
    view = Table(box=None, header_style="bold", pad_edge=False)
    view.add_column("", width=1)
    view.add_column("algorithm")
    metric = main_metric(groups)
    for head in (HEADS[metric], extreme_word(metric), "swing", "seeds", "rounds", "uploads", "MB up"):
        view.add_column(head, justify="right")
    for line in lines(groups):
        cells = [line.mark, line.label, line.final, line.extreme, line.swing]
        cells += [str(line.seeds), line.rounds, line.uploads, line.megabytes]
        view.add_row(*cells, style={BEST: "bold green", LEVEL: "green"}.get(line.mark))
    return view
