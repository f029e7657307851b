"""The comparison as tables: a line a group, and all settings at a glance; as text, and for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from .gap import mean_std
from .summary import BEST, LEVEL, Group, algorithm_title, by_setting, higher_is_better, main_metric, marks, show

HEADS = {"test_accuracy": "test accuracy", "test_loss": "test loss", "distance": "distance to optimum"}
BETWEEN, WIDEST_SETTING = 2, 24  # characters, in a terminal


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


@dataclass(frozen=True)
class Entry:
    """An algorithm in a setting, as text."""

    text: str = "–"
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.mark} {self.text}".lstrip()


@dataclass(frozen=True)
class Column:
    """A setting: what it is, what is measured in it, and how every algorithm does."""

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
    """Algorithms down, settings across; None where there is one setting only, or one algorithm."""
    settings = by_setting(groups)
    if len(settings) < 2:
        return None
    algorithms = list(dict.fromkeys(map(algorithm_title, groups)))
    seeds = max(len(g.runs) for g in groups)
    return Overview(algorithms, [_column(setting, own, algorithms, seeds) for setting, own in settings.items()])


def _column(setting: str, groups: Sequence[Group], algorithms: Sequence[str], seeds: int) -> Column:
    metric = main_metric(groups)
    found: dict[str, Entry] = {}
    for g, mark in zip(groups, marks(groups, metric), strict=True):
        ends = g.finals(metric)
        few = f" ({len(ends)} of {seeds} seeds)" if 0 < len(ends) < seeds else ""
        found[algorithm_title(g)] = Entry(show(metric, *mean_std(ends)) + few, mark)
    return Column(setting, HEADS[metric], [found.get(name, Entry()) for name in algorithms])


def overview_tables(found: Overview, width: int) -> list[Table]:
    """The overview for a terminal so wide, in as many pieces as it takes; a name that would leave no room for numbers is folded."""
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
    for column in columns:  # a long setting is folded, its numbers are not
        wanted = min(max(len(column.setting), len(column.head)), WIDEST_SETTING)
        width = min(max(column.widest, wanted), column.widest + spare)
        view.add_column(f"{column.setting}\n{column.head}", justify="right", overflow="fold", width=width)
    for k, algorithm in enumerate(algorithms):
        view.add_row(algorithm, *(str(column.entries[k]) for column in columns))
    return view


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
