"""The data of the report page, as its script reads it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..metrics.columns import percent
from ..metrics.history import History
from ..participation import observe
from ..tasks.metrics import higher_is_better
from .columns import NAMES, OWN_TEST, axis
from .curves import EARLY, as_number, axes_of, positions
from .export import results_csv, results_latex
from .figures import MOST_IN_ONE, class_table, schedule_words
from .pairs import pairs_csv
from .rates import RATES, rate_of, rate_setting
from .spread import mean_std
from .styles import PATTERNS
from .summary import Group, algorithm_title, colors_of, default_axis, main_metric, more_metrics

MOST_POINTS = 1000  # of a run's curve on the page
SHOWN_CLASSES = 6  # classes of a client in the tooltip


def page_data(groups: Sequence[Group]) -> dict[str, Any]:
    """What the page's script draws."""
    runs = [run for g in groups for run in g.runs]
    first, rate = main_metric(groups), rate_setting(groups)
    shown = [first, *more_metrics(groups), *(key for key in (*NAMES, *OWN_TEST) if any(g.finals(key) for g in groups))]
    metrics = {key: axis(key) for key in shown}
    axes, colors = axes_of(runs), colors_of(groups)
    schedules = _schedules(groups)
    key_of = {id(run): each.key for each in schedules for run in each.runs}
    settings = list(dict.fromkeys(key for g in groups for key in g.settings))
    several = len(colors) > 1 and settings
    return {
        "metrics": metrics,
        "percent": [key for key in metrics if percent(key)],
        "main": first,
        "higher": higher_is_better(first),
        "axes": axes,
        "axis": default_axis(groups),
        "early": EARLY,
        "settings": (["algorithm"] if several else []) + settings,
        "facet": _facet(groups, settings, rate),
        "rate": {"setting": rate, "label": RATES[rate]} if rate else None,
        "patterns": PATTERNS,
        "schedules": _shown(schedules),
        "groups": [_group(g, metrics, axes, colors[algorithm_title(g)], rate, key_of) for g in groups],
        "exports": {"csv": results_csv(groups), "latex": results_latex(groups), "pairs": pairs_csv(groups)},
    }


def _facet(groups: Sequence[Group], settings: Sequence[str], rate: str) -> str:
    """What the charts are split by at first: nothing if there are few curves, else everything but the rate."""
    rest = [key for key in settings if key != rate]
    if len(groups) <= MOST_IN_ONE or not rest:
        return ""
    return rest[0] if len(rest) == 1 else "*"


def _group(g: Group, metrics: dict[str, str], axes: dict[str, str], base: str, rate: str, key_of: dict[int, str]) -> dict[str, Any]:
    by_class = [found for run in g.runs if (found := run.last("class_accuracy"))]
    table = class_table(by_class) if by_class else np.empty((0, 0))
    means = [None if np.isnan(column).any() else round(float(column.mean()), 4) for column in table.T]
    return {
        "label": g.label,
        "color": g.color,
        "base": base,
        "strong": g.emphasized,
        "dash": g.dash,
        "settings": {"algorithm": algorithm_title(g)} | g.settings,
        "rate": rate_of(g, rate) if rate else None,
        "final": {key: _rounded(mean_std(ends)) if (ends := g.finals(key)) else None for key in metrics},
        "runs": [_run(run, metrics, axes) for run in g.runs],
        "classes": means,
        "clients": {key_of[id(run)]: _rounded(run.client_accuracy) for run in g.runs if run.client_accuracy},
        "tested": {key_of[id(run)]: _rounded(run.client_scores) for run in g.runs if run.client_scores},
        "thirds": _rounded(_thirds(g.runs)),
    }


def _run(run: History, metrics: dict[str, str], axes: dict[str, str]) -> dict[str, Any]:
    """The columns of a run that the page draws, thinned evenly if there are very many rounds."""
    step = max(1, -(-len(run.rows) // MOST_POINTS))
    last = len(run.rows) - 1
    kept = [k for k in range(len(run.rows)) if (last - k) % step == 0]
    rows = [run.rows[k] for k in kept]
    if step > 1:  # a thinned row shows the last values up to it
        rows = [_latest(run.rows, k, step, metrics) for k in kept]
    x = {axis: _at(positions(run.rows, axis), kept) for axis in axes}
    return {"x": _rounded(x), "y": {key: [_rounded(as_number(row.get(key))) for row in rows] for key in metrics}}


def _at(values: Sequence[float | None], kept: Sequence[int]) -> list[float | None]:
    return [values[k] for k in kept]


def _latest(rows: Sequence[dict[str, Any]], k: int, step: int, metrics: dict[str, str]) -> dict[str, Any]:
    near = rows[max(0, k - step + 1) : k + 1]
    return {key: next((row[key] for row in reversed(near) if row.get(key) is not None), None) for key in metrics}


def _thirds(runs: Sequence[History]) -> list[float]:
    """The mean accuracy on the clients that participate rarely, at a medium rate and often, a third each."""
    found = []
    for run in runs:
        known = [i for i, value in enumerate(run.client_accuracy) if as_number(value) is not None]
        if len(known) >= 3:
            share = run.active.mean(axis=0)
            order = sorted(known, key=lambda i: (share[i], i))
            found.append([float(np.mean([run.client_accuracy[i] for i in part])) for part in np.array_split(order, 3)])
    return np.mean(found, axis=0).tolist() if found else []


@dataclass
class _Schedule:
    """Which clients were active when, and the runs that have this schedule, the longest first; shorter ones have its first rounds."""

    key: str
    label: str  # of the group of the longest run
    runs: list[History]

    def begins_like(self, run: History) -> bool:
        return all(row["clients"] == own["clients"] for row, own in zip(self.runs[0].rows, run.rows, strict=False))


def _schedules(groups: Sequence[Group]) -> list[_Schedule]:
    """The schedules of all runs. Availability and seed do not determine them: a selection may depend on the model, a deadline on what an
    algorithm sends."""
    found: dict[str, list[_Schedule]] = {}
    pairs = [(g.label, run) for g in groups for run in g.runs]
    for label, run in sorted(pairs, key=lambda pair: -len(pair[1].rows)):
        same = found.setdefault(_setting(run), [])
        known = next((each for each in same if each.begins_like(run)), None)
        if known is None:
            same.append(_Schedule(f"{_setting(run)}, {len(same)}", label, [run]))
        else:
            known.runs.append(run)
    return [each for setting in dict.fromkeys(_setting(run) for _, run in pairs) for each in found[setting]]


def _setting(run: History) -> str:
    c = run.config
    return f"{c.get('availability')}, {c.get('dataset')}, {c.get('partition')}, {c.get('num_clients')} clients, seed {c.get('seed')}"


def _shown(schedules: Sequence[_Schedule]) -> list[dict[str, Any]]:
    """The schedules as the page draws them; those of one setting are distinguished by the label of a group."""
    drawn = [each for each in schedules if each.runs[0].rows]
    named = len({str(each.runs[0].config.get("availability")) for each in drawn}) > 1
    alike = Counter(_setting(each.runs[0]) for each in drawn)
    return [_schedule(each.key, each.runs[0], named, each.label if alike[_setting(each.runs[0])] > 1 else "") for each in drawn]


def _schedule(key: str, run: History, named: bool, label: str) -> dict[str, Any]:
    seen = observe(run.active)
    return {
        "key": key,
        "title": ", ".join([*schedule_words(run.config, named), *filter(None, [label])]),
        "rounds": seen.rounds,
        "clients": seen.clients,
        "active": [row["clients"] for row in run.rows],
        "participation": [round(float(p), 4) for p in seen.participation],
        "observed": seen.sentences(),
        "labels": None if run.class_counts is None else [_holds(counts) for counts in run.class_counts],
    }


def _holds(counts: np.ndarray) -> str:
    order = [c for c in np.argsort(-counts, kind="stable") if counts[c]]
    words = [f"{counts[c]} of class {c}" for c in order[:SHOWN_CLASSES]]
    return ", ".join(words) + (", ..." if len(order) > SHOWN_CLASSES else "")


def _rounded(value: Any) -> Any:
    """Six digits are more than a screen shows and keep the page small."""
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
