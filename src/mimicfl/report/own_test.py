"""The table of the clients' own test samples on the report page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..metrics.columns import head, percent, show, task_columns
from ..tasks.metrics import BY_COLUMN
from .columns import OWN_TEST
from .spread import mean_std
from .summary import Group


@dataclass(frozen=True)
class OwnTest:
    """The metric on the clients' own test samples: its name, and a line per group with the mean over seeds of every column."""

    metric: str
    percent: bool
    heads: list[str]
    lines: list[tuple[str, list[str]]]


def own_test(groups: Sequence[Group]) -> OwnTest | None:
    """The table; None if clients have no test samples of their own."""
    found = [g for g in groups if g.finals("clients_mean")]
    if not found:
        return None
    metric = client_metric(found[0].runs[0].config)
    heads = ["all clients", *(column.removeprefix("clients_").replace("_", " ") for column in OWN_TEST[1:])]
    lines = [(g.label, [show(metric, *mean_std(g.finals(column))) for column in OWN_TEST]) for g in found]
    return OwnTest(head(metric).removeprefix("test "), percent(metric), heads, lines)


def client_metric(config: dict[str, Any]) -> str:
    """The column of the metric that is computed per client: the first that can be."""
    return next((each for each in task_columns([config]) if each not in BY_COLUMN or BY_COLUMN[each].per_client), "test_accuracy")
