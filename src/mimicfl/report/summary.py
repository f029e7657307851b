"""Runs grouped by what sets them apart, and the figures of each group."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..config import BESIDE_THE_POINT, with_later
from ..fingerprint import Parts, digest
from ..metrics.history import History, Row
from ..text import visible
from .gap import TIE, Gap, mean_std
from .styles import SOLID, Dash, styles

TITLES = {"fedavg": "FedAvg", "fedprox": "FedProx", "scaffold": "SCAFFOLD", "mifa": "MIFA", "mimic": "MimiC"} | {
    "fedau": "FedAU",
    "fedavgm": "FedAvgM",
    "fedvarp": "FedVARP",
}
IGNORED = {"seed", "algorithm", "source", "preset", *BESIDE_THE_POINT}  # never part of a label
BEST, LEVEL = "★", "≈"
ROUNDING = 1e-6  # relative: engines agree up to this, so a smaller difference is nobody's lead
AXES = {"uploads": "model uploadings", "round": "round", "megabytes": "megabytes sent up, all clients"}
METRICS = {
    "test_accuracy": "test accuracy (%)",
    "test_loss": "test loss",
    "train_loss": "training loss",
    "distance": "distance to the optimum",
}


@dataclass(frozen=True)
class Curve:
    """Mean and standard deviation over the seeds."""

    x: list[float]
    mean: list[float]
    std: list[float]


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    label: str
    color: str
    runs: list[History]
    dash: Dash = SOLID
    setting: str = ""  # what else was varied, as in the label; empty where only algorithms were

    def finals(self, metric: str) -> list[float]:
        return [float(value) for run in self.runs if (value := run.last(metric)) is not None]

    def by_seed(self, metric: str) -> dict[int, float]:
        """The finals of the runs whose seed is known: under one seed, groups share split, schedule and first model."""
        finals = {run.config.get("seed"): run.last(metric) for run in self.runs}
        return {int(seed): float(end) for seed, end in finals.items() if seed is not None and end is not None}

    def curve(self, metric: str, axis: str = "uploads") -> Curve:
        return average([series(run.rows, metric, axis) for run in self.runs], by_position=axis == "megabytes")

    def swing(self, metric: str) -> float | None:
        """How much the curve shakes at the end: the standard deviation over the last quarter of the rounds, mean over seeds."""
        tails = []
        for run in self.runs:
            values = [row[metric] for row in run.rows if row.get(metric) is not None]
            tails.append(values[-max(2, len(values) // 4) :])
        shakes = [statistics.pstdev(tail) for tail in tails if len(tail) > 1]
        return statistics.mean(shakes) if shakes else None


def series(rows: list[Row], metric: str, axis: str) -> list[tuple[float, float]]:
    """(x, y) of one run; of rounds with the same x (empty ones cost nothing) the last counts."""
    points: dict[float, float] = {}
    for row in rows:
        if row.get(metric) is not None:
            x = row["bytes_up"] / 1e6 if axis == "megabytes" else row["round"] + 1 if axis == "round" else row["uploads"]
            points[float(x)] = float(row[metric])
    return sorted(points.items())


def average(runs: list[list[tuple[float, float]]], by_position: bool) -> Curve:
    """Mean curve of several runs, at the x they share; by position where x differs from run to run."""
    runs = [run for run in runs if run]
    if not runs:
        return Curve([], [], [])
    if by_position:
        length = min(map(len, runs))
        table = np.array([run[:length] for run in runs])  # [seeds, points, 2]
        x, y = table[:, :, 0].mean(axis=0), table[:, :, 1]
    else:
        shared = sorted(set.intersection(*[{x for x, _ in run} for run in runs]))
        x, y = np.array(shared), np.array([[dict(run)[v] for v in shared] for run in runs])
    std = y.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros(len(x))
    return Curve(x.tolist(), y.mean(axis=0).tolist(), std.tolist())


def group(histories: Sequence[History]) -> list[Group]:
    """Runs by algorithm and by whatever other setting differs among them, in the order they were given."""
    configs = [with_later(history.config) for history in histories]
    keys = {key for config in configs for key in config if key not in IGNORED}
    varied = sorted(key for key in keys if len({repr(config.get(key)) for config in configs}) > 1)
    named: dict[tuple[str, str], list[History]] = {}
    for history, config in zip(histories, configs, strict=True):
        setting = visible(", ".join(f"{key} {config.get(key)}" for key in varied), keep="")
        named.setdefault((str(config.get("algorithm", "run")), setting), []).append(history)
    collected = {
        (spec, ", ".join(filter(None, (setting, detail)))): found
        for (spec, setting), runs in named.items()
        for detail, found in told_apart(runs).items()
    }
    labels = [", ".join(filter(None, (title(spec), setting))) for spec, setting in collected]
    return [
        Group(label, color, runs, dash, setting)
        for label, (color, dash), ((_, setting), runs) in zip(labels, styles(list(collected)), collected.items(), strict=True)
    ]


def told_apart(runs: Sequence[History]) -> dict[str, list[History]]:
    """Runs with the same settings, grouped by what else differs, in words. Within each group a seed counts once.

    Runs made from Python objects can have the same settings and still be different experiments; and one run can be in two folders.
    """
    found: dict[str, list[History]] = {}
    for detail, alike in _by_parts(runs, lambda run: run.fingerprint.experiment).items():
        for more, same in _by_parts(alike, _own_parts, within_seed=True).items():
            found[", ".join(filter(None, (detail, more)))] = _once_per_seed(same)
    return found


def _by_parts(runs: Sequence[History], parts: Callable[[History], Parts], within_seed: bool = False) -> dict[str, list[History]]:
    """Runs grouped by the parts of their fingerprint that differ; with `within_seed`, only by parts that differ within a seed."""
    pools: dict[Any, list[History]] = {}
    for run in runs:
        pools.setdefault(run.config.get("seed") if within_seed else None, []).append(run)
    keys = dict.fromkeys(key for run in runs for key in parts(run))
    varied = [key for key in keys if any(len({parts(run).get(key) for run in pool}) > 1 for pool in pools.values())]
    found: dict[str, list[History]] = {}
    for run in runs:
        found.setdefault(", ".join(f"{key} {parts(run).get(key, 'unknown')[:6]}" for key in varied), []).append(run)
    return found


def _own_parts(run: History) -> Parts:
    """What identifies one run; for runs without a fingerprint, their numbers."""
    ends = [[row.get("test_loss"), row.get("train_loss")] for row in run.rows]
    return run.fingerprint.result or {"run": digest([ends, run.config.get("algorithm")])}


def _once_per_seed(runs: Sequence[History]) -> list[History]:
    """The longest run of every seed, in order of first appearance; runs of unknown seed all count."""
    longest: dict[Any, History] = {}
    for position, run in enumerate(runs):
        seed = run.config.get("seed", f"run {position}")
        if seed not in longest or len(run.rows) > len(longest[seed].rows):
            longest[seed] = run
    return list(longest.values())


def title(spec: str) -> str:
    """`fedprox:mu=0.1` as `FedProx (mu=0.1)`, always in one line."""
    name, _, options = visible(spec, keep="").partition(":")
    return TITLES.get(name, name) + (f" ({options})" if options else "")


def algorithm_title(g: Group) -> str:
    return title(str(g.runs[0].config.get("algorithm", "run")))


def main_metric(groups: Sequence[Group]) -> str:
    """Accuracy where there are classes, else the distance to a known optimum, else the test loss."""
    for metric in ("test_accuracy", "distance"):
        if all(g.finals(metric) for g in groups):
            return metric
    return "test_loss"


def higher_is_better(metric: str) -> bool:
    return metric == "test_accuracy"


def best(groups: Sequence[Group], metric: str) -> Group | None:
    scored = [(mean_std(g.finals(metric))[0], g) for g in groups if g.finals(metric)]
    if not scored:
        return None
    pick = max if higher_is_better(metric) else min
    return pick(scored, key=lambda pair: pair[0])[1]


def lead(left: Group, right: Group, metric: str) -> Gap:
    """How much better `left` ends than `right`, seed by seed."""
    sign = 1 if higher_is_better(metric) else -1
    return Gap.of(*({seed: sign * end for seed, end in g.by_seed(metric).items()} for g in (left, right)))


def equal(left: Group, right: Group, metric: str) -> bool:
    """Whether both end at the same figure, up to rounding."""
    return math.isclose(mean_std(left.finals(metric))[0], mean_std(right.finals(metric))[0], rel_tol=ROUNDING)


def marks(groups: Sequence[Group], metric: str) -> list[str]:
    """BEST for the one whose lead over everybody else counts; where there is none, LEVEL for those whom the best does not leave behind."""
    found: dict[str, str] = {}
    for own in by_setting(groups).values():
        rivals, _ = with_seeds_in_common(own, metric)
        winner = best(rivals, metric)
        if winner is None or len(rivals) < 2:
            continue
        level = [g for g in rivals if g is not winner and (equal(winner, g, metric) or lead(winner, g, metric).outcome == TIE)]
        found |= {g.label: LEVEL if level else BEST for g in (winner, *level)}
    return [found.get(g.label, "") for g in groups]


def by_setting(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups of each setting, where algorithms were compared in several; else all of them under an empty name."""
    settings: dict[str, list[Group]] = {}
    for g in groups:
        settings.setdefault(g.setting, []).append(g)
    return settings if len(settings) > 1 and max(map(len, settings.values())) > 1 else {"": list(groups)}


def verdict(groups: Sequence[Group]) -> str:
    """Who ends best and by how much, computed from the runs; where algorithms were compared in several settings, in each of them."""
    found = []
    for setting, own in by_setting(groups).items():  # which is said once, before the algorithms
        found.append(f"{setting}: {_verdict([replace(g, label=algorithm_title(g)) for g in own])}" if setting else _verdict(own))
    return "\n".join(found)


def _verdict(groups: Sequence[Group]) -> str:
    """In one setting; a lead within one standard error is called a tie."""
    metric = main_metric(groups)
    groups, few = with_seeds_in_common(groups, metric)
    winner = best(groups, metric)
    if winner is None:
        return "No evaluated round yet."
    others = [g for g in groups if g is not winner and g.finals(metric)]
    mean, std = mean_std(winner.finals(metric))
    if not others:
        return f"{winner.label} ends at {show(metric, mean, std)}."
    level = [g.label for g in groups if equal(winner, g, metric)]
    if len(level) > 1:
        return f"{', '.join(level[:-1])} and {level[-1]} end level at {show(metric, mean)}{few}: nobody ends better."
    second = best(others, metric)
    assert second is not None
    gap = abs(mean - mean_std(second.finals(metric))[0])
    points = f"{100 * gap:.1f} points above" if metric == "test_accuracy" else f"{gap:.3g} below"
    text = f"{winner.label} ends best at {show(metric, mean, std)}, {points} {second.label}{few}"
    shared = lead(winner, second, metric)
    if shared.seeds < 2:
        return f"{text} ({'one seed' if shared.seeds else 'no seed in common'}: how much of that is chance is not known)."
    close = [g.label for g in others if lead(winner, g, metric).outcome == TIE]
    if shared.outcome == TIE:
        more = [label for label in close if label != second.label]
        also = f", as is that to {' and to '.join(more)}" if more else ""
        return f"{text}, which is within one standard error of the differences seed by seed{also}: call it a tie."
    tie = f"; the difference to {' and '.join(close)} is within one standard error: call that a tie" if close else ""
    return f"{text}, ahead in {shared.ahead} of {shared.seeds} seeds{tie}."


def with_seeds_in_common(groups: Sequence[Group], metric: str) -> tuple[Sequence[Group], str]:
    """The groups without runs under seeds that others lack, and words that say so; all of them if no seed is in every group."""
    seeds = set.intersection(*[set(g.by_seed(metric)) for g in groups] or [set()])
    kept = [replace(g, runs=[run for run in g.runs if run.config.get("seed") in seeds]) for g in groups]
    if not seeds or all(len(k.runs) == len(g.runs) for k, g in zip(kept, groups, strict=True)):
        return groups, ""
    return kept, f" in the {len(seeds)} seeds that all have" if len(seeds) > 1 else ""


def show(metric: str, mean: float, std: float | None = None) -> str:
    """A mean with its spread, where more than one seed gave it."""
    if math.isnan(mean):
        return "–"
    if metric == "test_accuracy":
        return f"{100 * mean:.1f} %" if std is None else f"{100 * mean:.1f} ± {100 * std:.1f} %"
    return f"{mean:.4g}" if std is None else f"{mean:.4g} ± {std:.2g}"
