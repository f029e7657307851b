"""Learning rates in a sweep: how the result depends on them, and which is the best for each algorithm."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..metrics.columns import show
from ..registry import parse
from ..tasks.metrics import higher_is_better
from .curves import as_number
from .spread import mean_std
from .summary import Group, algorithm_title, by_setting, main_metric

RATES = {"lr": "learning rate", "global_lr": "global learning rate"}  # settings that are rates, the most usual first


@dataclass(frozen=True)
class BestRate:
    """The rate with the best result of one algorithm in one setting."""

    algorithm: str
    setting: str  # everything else that varies
    rate: str
    final: str
    tried: list[str]  # in increasing order
    edge: str  # "smallest" or "largest" if the best rate is at the edge of what was tried, else empty

    @property
    def advice(self) -> str:
        if not self.edge:
            return ""
        return f"{self.edge} tried; try {'smaller' if self.edge == 'smallest' else 'larger'} ones"


def rate_setting(groups: Sequence[Group]) -> str:
    """The setting that is a varied rate; empty if there is none."""
    for name in RATES:
        if len({rate_of(g, name) for g in groups} - {None}) > 1:
            return name
    return ""


def rate_of(g: Group, setting: str) -> float | None:
    """The rate of a group as a number: that of the first round, for a schedule."""
    value = g.settings.get(setting)
    if value is None:
        return None
    try:
        return float(value)
    except ValueError:
        _, values, _ = parse(value)
    return as_number(values[0]) if values else None


def best_rates(groups: Sequence[Group]) -> list[BestRate]:
    """The best rate of every algorithm in every setting; nothing if no rate varies."""
    name = rate_setting(groups)
    if not name:
        return []
    metric = main_metric(groups)
    return [_best(*key, found, name, metric) for key, found in _tried(groups, name, metric).items()]


def at_best_rates(groups: Sequence[Group]) -> list[Group]:
    """The group with the best rate of every algorithm in every setting, setting by setting; all groups if no rate varies."""
    name = rate_setting(groups)
    if not name:
        return [g for rivals in by_setting(groups).values() for g in rivals]
    metric = main_metric(groups)
    tried = _tried(groups, name, metric)
    settings = dict.fromkeys(setting for _, setting in tried)
    return [_pick(found, metric) for wanted in settings for (_, setting), found in tried.items() if setting == wanted]


def _tried(groups: Sequence[Group], name: str, metric: str) -> dict[tuple[str, str], list[Group]]:
    """The groups that differ only in the rate, by algorithm and setting, if any of them has a result."""
    alike: dict[tuple[str, str], list[Group]] = {}
    for g in groups:
        rest = ", ".join(f"{key} {value}" for key, value in g.settings.items() if key != name)
        if rate_of(g, name) is not None:
            alike.setdefault((algorithm_title(g), rest), []).append(g)
    return {key: found for key, found in alike.items() if any(g.finals(metric) for g in found)}


def _pick(groups: Sequence[Group], metric: str) -> Group:
    pick = max if higher_is_better(metric) else min
    return pick((g for g in groups if g.finals(metric)), key=lambda g: mean_std(g.finals(metric))[0])


def _best(algorithm: str, setting: str, groups: Sequence[Group], name: str, metric: str) -> BestRate:
    ordered = sorted(groups, key=lambda g: rate_of(g, name) or 0.0)
    # A rate whose runs diverged has no result, but it was tried: the best rate next to it is not at the edge.
    best = _pick(ordered, metric)
    tried = [g.settings[name] for g in ordered]
    edge = "" if len(ordered) < 2 else "smallest" if best is ordered[0] else "largest" if best is ordered[-1] else ""
    return BestRate(algorithm, setting, best.settings[name], show(metric, *mean_std(best.finals(metric))), tried, edge)
