"""`runs`: a table of the runs below a folder."""

import argparse
import csv
import fnmatch
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from ..errors import UsageError, nearest
from ..metrics.columns import head, show
from ..metrics.listing import Listed, differing, list_runs
from ..settings import with_added_later
from ..text import counted, for_spreadsheet

CONDITION = re.compile(r"([\w.-]+)\s*(!=|>=|<=|=|>|<)(.*)", re.DOTALL)
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
}
NAMES = {"accuracy": "test_accuracy", "loss": "test_loss", "clients": "num_clients"}
STYLES = {"finished": "green", "running": "cyan", "interrupted": "yellow", "damaged": "red"}


def runs(arguments: argparse.Namespace, console: Console) -> None:
    found = list_runs(arguments.folder)
    if not found:
        raise UsageError(f"{arguments.folder} holds no run: there is no config.toml in it or below it")
    kept = [run for run in found if all(_holds(run, condition, found) for condition in arguments.filter)]
    if arguments.sort:
        kept = _sorted(kept, arguments.sort, arguments.reverse, found)
    if arguments.metric:
        _check_known(arguments.metric, found)
    settings = [name for name in differing(found) if name != "rounds"]  # the rounds have a column anyway
    heads, rows = _cells(kept, settings, arguments.metric)
    if arguments.csv:
        return csv.writer(sys.stdout, lineterminator="\n").writerows([map(for_spreadsheet, line) for line in (heads, *rows)])
    left_out = _too_wide(heads, rows, settings, console.width)
    heads, *rows = ([cell for name, cell in zip(heads, line, strict=True) if name not in left_out] for line in (heads, *rows))
    view = Table(box=None, header_style="bold", pad_edge=False)
    for name in heads:
        view.add_column(name, overflow="fold", justify="left" if name in ("run", "status", *settings) else "right")
    for row in rows:
        view.add_row(*row, style=None if row[1] == "finished" else STYLES[row[1]])
    console.print(view)
    shown = counted(len(found), "run") if len(kept) == len(found) else f"{len(kept)} of {counted(len(found), 'run')}"
    states = [f"{sum(run.status == state for run in kept)} {state}" for state in STYLES if any(run.status == state for run in kept)]
    console.print(f"\n{', '.join([shown, *states])}", style="dim")
    if left_out:
        console.print(
            f"not shown, because the terminal is too narrow: {', '.join(left_out)}; --csv prints all", style="dim", soft_wrap=True
        )
    return None


def _too_wide(heads: Sequence[str], rows: Sequence[Sequence[str]], settings: Sequence[str], width: int) -> list[str]:
    """The settings to leave out, widest first, so that a line of the table fits; algorithm and seed stay, long folders are folded."""
    widths = {name: max(map(cell_len, column)) + 2 for name, column in zip(heads, zip(heads, *rows, strict=True), strict=True)}
    widths["run"] = min(widths["run"], max(20, 2 * width // 5))
    for name in sorted((name for name in settings if name not in ("algorithm", "seed")), key=widths.__getitem__, reverse=True):
        if sum(widths.values()) - 2 > width:
            del widths[name]
    return [name for name in settings if name not in widths]


def _cells(runs: Sequence[Listed], settings: Sequence[str], metric: str | None) -> tuple[list[str], list[list[str]]]:
    names = list(dict.fromkeys((metric and _column(metric)) or run.metric for run in runs if run.rounds)) or ["test_accuracy"]
    rows = []
    for run in runs:
        config = with_added_later(run.config)
        values = [_number(name, run.last.get(name)) for name in names]
        rows.append(
            [str(run.path), run.status, *[str(config.get(key, "")) for key in settings], str(run.rounds), *values, _age(run.changed)]
        )
    return ["run", "status", *settings, "rounds", *[head(name) for name in names], "changed"], rows


def _column(key: str) -> str:
    return NAMES.get(key, key.replace("-", "_"))


def _value(run: Listed, key: str) -> Any:
    """A column of the table, a column of the rows, or a setting."""
    own = {"run": str(run.path), "status": run.status, "rounds": run.rounds, "changed": run.changed}
    name = _column(key)
    return own.get(name, run.last.get(name, with_added_later(run.config).get(name)))


def _check_known(key: str, runs: Sequence[Listed]) -> None:
    known = {"run", "status", "rounds", "changed", *NAMES, *(name for run in runs for name in {**run.last, **with_added_later(run.config)})}
    if key not in known and _column(key) not in known:
        raise UsageError(f"there is no column or setting {key!r}; {nearest(key, known)}")


def _holds(run: Listed, condition: str, runs: Sequence[Listed]) -> bool:
    found = CONDITION.fullmatch(condition)
    if found is None:
        raise UsageError(f"a filter must be KEY=VALUE, as in algorithm=mimic* or accuracy>0.9, got {condition!r}")
    key, operator, text = found.groups()
    _check_known(key, runs)
    value = _value(run, key)
    if operator in ("=", "!="):
        return (fnmatch.fnmatchcase(str(value), text) or _as_number(value) == _as_number(text) is not None) == (operator == "=")
    left, right = _as_number(value), _as_number(text)
    if right is None:
        raise UsageError(f"{operator} compares numbers, got {text!r}; write {key}={text} for text")
    return left is not None and COMPARE[operator](left, right)


def _as_number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _sorted(runs: Sequence[Listed], name: str, backwards: bool, known: Sequence[Listed]) -> list[Listed]:
    """Numbers before text, and runs without a value last."""
    _check_known(name, known)
    values = {id(run): _value(run, name) for run in runs}
    numbers = [run for run in runs if _as_number(values[id(run)]) is not None]
    texts = [run for run in runs if values[id(run)] is not None and run not in numbers]
    rest = [run for run in runs if values[id(run)] is None]
    numbers.sort(key=lambda run: _as_number(values[id(run)]) or 0.0, reverse=backwards)
    texts.sort(key=lambda run: str(values[id(run)]), reverse=backwards)
    return [*numbers, *texts, *rest]


def _number(name: str, value: Any) -> str:
    if value is None:
        return "–"
    return show(name, value)


def _age(changed: float) -> str:
    """`5 s ago`, `3 h ago`."""
    seconds = max(0.0, time.time() - changed)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
