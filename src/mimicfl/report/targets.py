"""What it costs each algorithm to reach a target: rounds, uploads, bytes and virtual time, the median over seeds."""

from collections.abc import Sequence

from rich.table import Table

from ..errors import UsageError, number
from ..metrics.columns import head, percent, show
from ..metrics.curves import censored_median, first_to_reach
from ..tasks.metrics import higher_is_better
from .curves import positions
from .summary import Group, main_metric

COSTS = {"round": "rounds", "uploads": "uploads", "megabytes": "MB up", "virtual_seconds": "virtual s"}


def target_table(groups: Sequence[Group], target: float) -> Table:
    """One line per group. A run that ends before it reaches the target is censored there: its cost is known to be higher."""
    metric = main_metric(groups)
    if percent(metric) and not 0 <= number("--target", target) <= 1:
        raise UsageError(f"--target is a share, such as 0.8 for a {head(metric)} of 80 %; got {target:g}")
    timed = all("virtual_seconds" in row for g in groups for run in g.runs for row in run.rows)
    axes = [axis for axis in COSTS if timed or axis != "virtual_seconds"]
    view = Table(box=None, header_style="bold", pad_edge=False)
    view.add_column(f"until {head(metric)} is {show(metric, target)}")
    for name in ("reached", *(COSTS[axis] for axis in axes)):
        view.add_column(name, justify="right")
    for g in groups:
        view.add_row(*_line(g, metric, target, axes))
    return view


def _line(g: Group, metric: str, target: float, axes: Sequence[str]) -> list[str]:
    runs = [run.rows for run in g.runs if run.rows]
    found = [first_to_reach(rows, target, metric, higher_is_better(metric)) for rows in runs]
    cells = [g.label, f"{sum(row is not None for row in found)} of {len(runs)}"]
    for axis in axes:
        reached = [positions([row], axis)[0] or 0.0 for row in found if row is not None]
        censored = [positions(rows, axis)[-1] or 0.0 for rows, row in zip(runs, found, strict=True) if row is None]
        median = censored_median(reached, censored)
        cells.append(f"> {max(censored):.4g}" if median is None else f"{median:.4g}")
    return cells
