"""Group runs by algorithm and setting, and summarize each group."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..fingerprint import Parts, digest
from ..metrics.columns import task_columns
from ..metrics.curves import swing
from ..metrics.history import History
from ..settings import NOT_IN_RESULT, with_added_later
from ..tasks.metrics import BY_COLUMN
from ..text import visible
from .curves import BY_POSITION, DEFAULT_AXES, Curve, average, own_metrics, series
from .styles import SOLID, Dash, algorithm_colors, is_emphasized, remember, styles, title_of

IGNORED = {"seed", "algorithm", "source", "preset", *NOT_IN_RESULT}  # never part of a label


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    color: str
    runs: list[History]
    dash: Dash = SOLID
    setting: str = ""  # the varied settings, as in the label; empty if only the algorithm varies
    settings: dict[str, str] = field(default_factory=dict)  # the same, one by one

    @property
    def emphasized(self) -> bool:
        """Whether the algorithm asks for a thicker line."""
        return is_emphasized(_algorithm(self.runs[0])) if self.runs else False

    def finals(self, metric: str) -> list[float]:
        """The final values of the runs that have one."""
        return [float(value) for run in self.runs if (value := run.last(metric)) is not None]

    def by_seed(self, metric: str) -> dict[int, float]:
        """The final values by seed. Groups with the same seed share split, schedule and initial model."""
        finals = {run.config.get("seed"): run.last(metric) for run in self.runs}
        return {int(seed): float(end) for seed, end in finals.items() if seed is not None and end is not None}

    def curve(self, metric: str, axis: str = "uploads") -> Curve:
        """The mean curve over the seeds."""
        return average([series(run.rows, metric, axis) for run in self.runs], by_position=axis in BY_POSITION)

    def swing(self, metric: str) -> float | None:
        """How much the curve oscillates at the end: the standard deviation over the last quarter of the rounds, mean over seeds."""
        found = [value for run in self.runs if (value := swing(run.rows, metric)) is not None]
        return statistics.mean(found) if found else None


def group(histories: Sequence[History]) -> list[Group]:
    """Group runs by algorithm and by the settings that differ among them, in the given order."""
    for history in histories:
        remember(_algorithm(history), history.shown_as)
    configs = [with_added_later(history.config) for history in histories]
    keys = {key for config in configs for key in config if key not in IGNORED}
    varied = sorted(key for key in keys if len({repr(config.get(key)) for config in configs}) > 1)
    named: dict[tuple[str, str], list[History]] = {}
    values: dict[str, dict[str, str]] = {}  # of the varied settings
    for history, config in zip(histories, configs, strict=True):
        own = {visible(key, keep=""): visible(str(config.get(key)), keep="") for key in varied}
        setting = ", ".join(f"{key} {value}" for key, value in own.items())
        named.setdefault((str(config.get("algorithm", "run")), setting), []).append(history)
        values[setting] = own
    collected: dict[tuple[str, str], tuple[list[History], dict[str, str]]] = {}
    for (spec, setting), runs in named.items():
        for detail, found in split_by_fingerprint(runs).items():
            settings = values[setting] | ({"variant": detail} if detail else {})
            collected[spec, ", ".join(filter(None, (setting, detail)))] = found, settings
    labels = [", ".join(filter(None, (title(spec), setting))) for spec, setting in collected]
    return [
        Group(label, color, runs, dash, setting, settings)
        for label, (color, dash), ((_, setting), (runs, settings)) in zip(labels, styles(list(collected)), collected.items(), strict=True)
    ]


def split_by_fingerprint(runs: Sequence[History]) -> dict[str, list[History]]:
    """Group runs with the same settings by their fingerprints; the keys describe what differs. Each group has one run per seed.

    Runs made from Python objects can have the same settings and still be different experiments, and two folders can hold the same run.
    """
    found: dict[str, list[History]] = {}
    for detail, alike in _by_parts(runs, lambda run: run.fingerprint.experiment).items():
        for more, same in _by_parts(alike, _result_parts, within_seed=True).items():
            found[", ".join(filter(None, (detail, more)))] = _once_per_seed(same)
    return found


def _by_parts(runs: Sequence[History], parts: Callable[[History], Parts], within_seed: bool = False) -> dict[str, list[History]]:
    """Group runs by the parts of their fingerprint that differ; with `within_seed`, only by parts that differ within a seed."""
    pools: dict[Any, list[History]] = {}
    for run in runs:
        pools.setdefault(run.config.get("seed") if within_seed else None, []).append(run)
    keys = dict.fromkeys(key for run in runs for key in parts(run))
    varied = [key for key in keys if any(len({parts(run).get(key) for run in pool}) > 1 for pool in pools.values())]
    found: dict[str, list[History]] = {}
    for run in runs:
        found.setdefault(", ".join(f"{key} {parts(run).get(key, 'unknown')[:6]}" for key in varied), []).append(run)
    return found


def _result_parts(run: History) -> Parts:
    """The fingerprint of a run's result; for runs without a fingerprint, a hash of their losses."""
    ends = [[row.get("test_loss"), row.get("train_loss")] for row in run.rows]
    return run.fingerprint.result or {"run": digest([ends, run.config.get("algorithm")])}


def _once_per_seed(runs: Sequence[History]) -> list[History]:
    """The longest run of every seed, in order of first appearance. Runs without a seed are all kept."""
    longest: dict[Any, History] = {}
    for position, run in enumerate(runs):
        seed = run.config.get("seed", f"run {position}")
        if seed not in longest or len(run.rows) > len(longest[seed].rows):
            longest[seed] = run
    return list(longest.values())


def title(spec: str) -> str:
    """The title of an algorithm with its options on one line: `fedprox:mu=0.1` is `FedProx (mu=0.1)`."""
    name, _, options = visible(spec, keep="").partition(":")
    return title_of(name) + (f" ({options})" if options else "")


def algorithm_title(g: Group) -> str:
    return title(_algorithm(g.runs[0]))


def colors_of(groups: Sequence[Group]) -> dict[str, str]:
    """One colour per algorithm, by its title."""
    return algorithm_colors([(algorithm_title(g), _algorithm(g.runs[0])) for g in groups])


def _algorithm(run: History) -> str:
    return str(run.config.get("algorithm", "run"))


def main_metric(groups: Sequence[Group]) -> str:
    """The first built-in metric of the runs' task; without a task accuracy, else the distance to a known optimum, else the test loss.

    Groups that have not been evaluated yet are ignored.
    """
    given = [column for column in task_columns([run.config for g in groups for run in g.runs]) if column in BY_COLUMN]
    order = (*given, "test_accuracy", "distance")
    evaluated = [g for g in groups if any(g.finals(metric) for metric in (*order, "test_loss"))]
    return next((metric for metric in order if evaluated and all(g.finals(metric) for g in evaluated)), "test_loss")


def default_axis(groups: Sequence[Group]) -> str:
    """What curves are drawn against at first: model uploads, or rounds if only they let every mean curve end where its table entry does."""
    metric = main_metric(groups)
    reached = (axis for axis in DEFAULT_AXES if not any(g.curve(metric, axis).early for g in groups))
    return next(reached, DEFAULT_AXES[0])


def more_metrics(groups: Sequence[Group]) -> list[str]:
    """The other metrics of the runs' task and of callbacks that some run has."""
    runs = [run for g in groups for run in g.runs]
    found = dict.fromkeys([*task_columns([run.config for run in runs]), *own_metrics(runs)])
    return [metric for metric in found if metric != main_metric(groups) and any(g.finals(metric) for g in groups)]


def by_setting(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups by setting if algorithms were compared in several settings; else all groups under an empty name."""
    settings: dict[str, list[Group]] = {}
    for g in groups:
        settings.setdefault(g.setting, []).append(g)
    return settings if len(settings) > 1 and max(map(len, settings.values())) > 1 else {"": list(groups)}


def with_seeds_in_common(groups: Sequence[Group], metric: str) -> tuple[Sequence[Group], str]:
    """The groups restricted to the seeds that all share, and words that say so. Unchanged if no seed is in every group.

    Groups without a final value do not count: they cannot be compared with any seed.
    """
    seeds = set.intersection(*[set(g.by_seed(metric)) for g in groups if g.finals(metric)] or [set()])
    kept = [replace(g, runs=[run for run in g.runs if run.config.get("seed") in seeds]) if g.finals(metric) else g for g in groups]
    if not seeds or all(len(k.runs) == len(g.runs) for k, g in zip(kept, groups, strict=True)):
        return groups, ""
    return kept, f" over the {len(seeds)} seeds that all share" if len(seeds) > 1 else ""
