"""Tables of a comparison: one line per group, and an overview of all settings; as text and for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ..metrics.columns import head, percent, show
from ..tasks.metrics import higher_is_better
from .rates import BestRate
from .spread import mean_std
from .summary import Group, algorithm_title, by_setting, main_metric, more_metrics
from .verdict import FIRST, marks

BETWEEN, WIDEST_SETTING = 2, 24  # characters, in a terminal
MOST_MORE = 5  # further metrics in a terminal; the page shows all


@dataclass(frozen=True)
class Line:
    """One line of the result table, as text."""

    label: str
    final: str
    extreme: str  # the best point of each run, averaged
    swing: str
    seeds: int  # of which the mean is made
    rounds: str
    uploads: str
    megabytes: str
    mark: str  # of the best and those that tie with it, else empty
    more: tuple[str, ...] = ()  # further metrics of the task, and of callbacks


def lines(groups: Sequence[Group]) -> list[Line]:
    """The result table, one line per group."""
    metric = main_metric(groups)
    more = more_metrics(groups)
    return [_line(g, metric, mark, more) for g, mark in zip(groups, marks(groups, metric), strict=True)]


def _line(g: Group, metric: str, mark: str, more: Sequence[str]) -> Line:
    values = [[row[metric] for row in run.rows if row.get(metric) is not None] for run in g.runs]
    pick = max if higher_is_better(metric) else min
    extreme, _ = mean_std([pick(v) for v in values if v])
    swing = g.swing(metric)
    ends = [run.rows[-1] for run in g.runs if run.rows]
    return Line(
        label=g.label,
        final=show(metric, *mean_std(g.finals(metric))),
        extreme=show(metric, extreme),
        swing="–" if swing is None else (f"{100 * swing:.1f}" if percent(metric) else f"{swing:.2g}"),
        seeds=len(g.finals(metric)),
        rounds=_span([end["round"] + 1 for end in ends]),
        uploads=_span([end["uploads"] for end in ends]),
        megabytes=f"{mean_std([end['bytes_up'] / 1e6 for end in ends])[0]:.3g}",
        mark=mark,
        more=tuple(show(each, *mean_std(g.finals(each))) for each in more),
    )


def extreme_word(metric: str) -> str:
    return "peak" if higher_is_better(metric) else "lowest"


def _span(values: list[int]) -> str:
    if not values:
        return "0"
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}-{max(values)}"


@dataclass(frozen=True)
class Entry:
    """The result of an algorithm in a setting, as text."""

    text: str = "–"
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.mark} {self.text}".lstrip()


@dataclass(frozen=True)
class Column:
    """A setting: its name, the metric, and the result of every algorithm."""

    setting: str
    head: str
    entries: list[Entry]

    @property
    def widest(self) -> int:
        return max(len(str(entry)) for entry in self.entries)


@dataclass(frozen=True)
class Overview:
    algorithms: list[str]
    columns: list[Column]


def overview(groups: Sequence[Group]) -> Overview | None:
    """A table of algorithms (rows) and settings (columns); None if there is only one setting or one algorithm."""
    settings = by_setting(groups)
    if len(settings) < 2:
        return None
    algorithms = list(dict.fromkeys(map(algorithm_title, groups)))
    seeds = max(len(g.runs) for g in groups)
    return Overview(algorithms, [_column(setting, rivals, algorithms, seeds) for setting, rivals in settings.items()])


def _column(setting: str, groups: Sequence[Group], algorithms: Sequence[str], seeds: int) -> Column:
    metric = main_metric(groups)
    found: dict[str, Entry] = {}
    for g, mark in zip(groups, marks(groups, metric), strict=True):
        ends = g.finals(metric)
        few = f" ({len(ends)} of {seeds} seeds)" if 0 < len(ends) < seeds else ""
        found[algorithm_title(g)] = Entry(show(metric, *mean_std(ends)) + few, mark)
    return Column(setting, head(metric), [found.get(name, Entry()) for name in algorithms])


def overview_tables(found: Overview, width: int) -> list[Table]:
    """The overview for a terminal of this width, split into several tables if necessary. Long names are folded, numbers are not."""
    most = width - BETWEEN - max(column.widest for column in found.columns)
    names = min(max(map(len, ["algorithm", *found.algorithms])), max(most, len("algorithm")))
    room = width - names
    pieces: list[list[Column]] = []
    for column in found.columns:
        if not pieces or sum(BETWEEN + c.widest for c in (*pieces[-1], column)) > room:
            pieces.append([])
        pieces[-1].append(column)
    return [_piece(found.algorithms, columns, names, room) for columns in pieces]


def _piece(algorithms: Sequence[str], columns: Sequence[Column], names: int, room: int) -> Table:
    view = Table(box=None, header_style="bold", pad_edge=False)
    view.add_column("algorithm", overflow="fold", min_width=names, max_width=names)
    spare = max(room - sum(BETWEEN + column.widest for column in columns), 0) // len(columns)
    for column in columns:  # fold a long setting, never its numbers
        wanted = min(max(len(column.setting), len(column.head)), WIDEST_SETTING)
        width = min(max(column.widest, wanted), column.widest + spare)
        setting = column.setting if len(column.setting) <= width else column.setting.replace(", ", ",\n")
        view.add_column(f"{setting}\n{column.head}", justify="right", overflow="fold", width=width)
    for k, algorithm in enumerate(algorithms):
        view.add_row(algorithm, *(str(column.entries[k]) for column in columns))
    return view


def table(groups: Sequence[Group]) -> Table:
    """The result table for the terminal: mean ± standard deviation over seeds. The best is marked, and those that tie with it."""
    view = Table(box=None, header_style="bold", pad_edge=False)
    view.add_column("", width=1)
    view.add_column("algorithm")
    metric = main_metric(groups)
    more = [head(each) for each in more_metrics(groups)][:MOST_MORE]
    for name in (head(metric), *more, extreme_word(metric), "swing", "seeds", "rounds", "uploads", "MB up"):
        view.add_column(name, justify="right")
    for line in lines(groups):
        cells = [line.mark, line.label, line.final, *line.more[:MOST_MORE], line.extreme, line.swing]
        cells += [str(line.seeds), line.rounds, line.uploads, line.megabytes]
        view.add_row(*cells, style="bold green" if line.mark == FIRST else "green" if line.mark else None)
    return view


def rates_table(found: Sequence[BestRate], setting: str) -> Table:
    """The best rate of every algorithm, for the terminal."""
    view = Table(box=None, header_style="bold", pad_edge=False)
    varied = any(each.setting for each in found)
    for name in ("algorithm", *(["setting"] if varied else []), f"best {setting}", "result", ""):
        view.add_column(name, overflow="fold", justify="right" if name == "result" else "left")
    for each in found:
        cells = [each.algorithm, *([each.setting] if varied else []), each.rate, each.final, each.advice]
        view.add_row(*cells, style="yellow" if each.edge else None)
    return view
