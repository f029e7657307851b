"""Which algorithm ends best, and whether the seeds decide it: the same rule for tables, pages, LaTeX and the terminal."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..metrics.columns import percent, show
from ..significance import LEVEL, NO, TIE, UNDECIDED, YES, Paired, holm, outcome
from ..tasks.metrics import higher_is_better
from .spread import mean_std
from .summary import Group, algorithm_title, by_setting, main_metric, with_seeds_in_common

FIRST, TIED, OPEN = "★", "≈", "○"
ENOUGH = 3  # seeds for a significant lead: a test of two rests on one degree of freedom, and two equal leads may be luck
RULE = (
    f"First: ahead of every other algorithm with p < {LEVEL:g}, in paired t tests adjusted for all pairs (Holm), with at least {ENOUGH} "
    "seeds. Tied: certainly within 1 point (or 1 % of a value that is not in percent). Undecided: neither, as is usual with few seeds."
)
MARGIN = 0.01  # of a tie
MANY_SETTINGS = 4  # with as many or more, a count comes before the verdicts
MANY_GROUPS = 40  # with more, only the pairs with the best group are tested
ROUNDING = 1e-6  # relative: engines agree up to this, so a smaller difference is no lead


@dataclass(frozen=True)
class Pair:
    """Two groups of a setting, and what their difference shows."""

    better: Group  # has the better mean
    other: Group
    lead: Paired  # how much better the first ends, by seed
    adjusted: float  # p after Holm, over all pairs of the setting
    outcome: str


@dataclass(frozen=True)
class Standing:
    """The group with the best mean, and what its lead over each of the others shows."""

    best: Group
    leads: dict[str, Paired]  # by label of the other group
    outcomes: dict[str, str]

    @property
    def mark(self) -> str:
        """The mark of the best group."""
        found = set(self.outcomes.values())
        if not self.tested:
            return TIED if TIE in found else OPEN
        return FIRST if found <= {YES} else TIED if found <= {YES, TIE} else OPEN

    @property
    def tested(self) -> bool:
        """Whether there are enough seeds for any test."""
        return any(lead.pairs > 1 for lead in self.leads.values())

    def labels(self, result: str) -> list[str]:
        return [label for label, found in self.outcomes.items() if found == result]


def standing(groups: Sequence[Group], metric: str) -> Standing | None:
    """Compare the best group of a setting with the others; None if there is nothing to compare."""
    pairs = compared(groups, metric)
    if not pairs:
        return None
    of_best = {pair.other.label: pair for pair in pairs if pair.better is pairs[0].better}
    found = {g.label: of_best[g.label] for g in groups if g.label in of_best}  # in the order of the groups
    return Standing(pairs[0].better, {label: pair.lead for label, pair in found.items()}, {label: p.outcome for label, p in found.items()})


def compared(groups: Sequence[Group], metric: str) -> list[Pair]:
    """All pairs of groups of a setting, best means first; of very many groups only the pairs with the best."""
    rivals = [g for g in groups if g.finals(metric)]
    order = sorted(rivals, key=lambda g: mean_std(g.finals(metric))[0], reverse=higher_is_better(metric))
    few = len(rivals) <= MANY_GROUPS
    leads = [(a, b, lead(a, b, metric)) for a, b in (itertools.combinations(order, 2) if few else ((order[0], g) for g in order[1:]))]
    # Any pair could have been the best two, so all pairs count: only then may the winner be named after the fact.
    adjusted = holm({k: found.p for k, (_, _, found) in enumerate(leads)}, of=math.comb(len(rivals), 2))
    margin = MARGIN * (1.0 if percent(metric) or not order else abs(mean_std(order[0].finals(metric))[0]))
    return [
        Pair(a, b, found, adjusted[k], TIE if equal(a, b, metric) else _outcome(found, adjusted[k], margin))
        for k, (a, b, found) in enumerate(leads)
    ]


def _outcome(found: Paired, adjusted: float, margin: float) -> str:
    decided = outcome(found, adjusted, margin)
    return UNDECIDED if decided in (YES, NO) and found.pairs < ENOUGH else decided


def best(groups: Sequence[Group], metric: str) -> Group | None:
    """The group with the best mean, or None if no group has a final value."""
    scored = [(mean_std(g.finals(metric))[0], g) for g in groups if g.finals(metric)]
    if not scored:
        return None
    pick = max if higher_is_better(metric) else min
    return pick(scored, key=lambda pair: pair[0])[1]


def lead(left: Group, right: Group, metric: str) -> Paired:
    """How much better `left` ends than `right`, paired by seed."""
    sign = 1 if higher_is_better(metric) else -1
    return Paired.between(*({seed: sign * end for seed, end in g.by_seed(metric).items()} for g in (left, right)))


def equal(left: Group, right: Group, metric: str) -> bool:
    """Whether both end alike, up to rounding: with every seed they share. Equal means of different results decide nothing."""
    one, other = left.by_seed(metric), right.by_seed(metric)
    return not one.keys().isdisjoint(other) and all(math.isclose(one[seed], other[seed], rel_tol=ROUNDING) for seed in one if seed in other)


def marks(groups: Sequence[Group], metric: str) -> list[str]:
    """A mark per group: FIRST, TIED or OPEN (undecided) for the best of a setting, TIED for those that tie with it, else empty."""
    found: dict[str, str] = {}
    for same_setting in by_setting(groups).values():
        at = standing(with_seeds_in_common(same_setting, metric)[0], metric)
        if at is not None:
            found |= {at.best.label: at.mark} | dict.fromkeys(at.labels(TIE), TIED)
    return [found.get(g.label, "") for g in groups]


def tally(groups: Sequence[Group]) -> str:
    """In how many settings each algorithm is first, and in how many it has the best mean; empty if there are few settings."""
    settings = by_setting(groups)
    if len(settings) < MANY_SETTINGS:
        return ""
    counts: dict[str, list[int]] = {algorithm_title(g): [0, 0] for g in groups}
    for rivals in settings.values():
        for g, mark in zip(rivals, marks(rivals, main_metric(rivals)), strict=True):
            counts[algorithm_title(g)][0] += mark == FIRST
            counts[algorithm_title(g)][1] += bool(mark)
    first, best_mean = ({name: each[k] for name, each in counts.items() if each[k]} for k in (0, 1))
    return f"Of {len(settings)} settings, significantly first in: {_counted(first)}. Best mean, or tied with it, in: {_counted(best_mean)}."


def _counted(counts: dict[str, int]) -> str:
    """`MimiC 3, FedAvg 1`, the largest first."""
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda pair: -pair[1])) or "none"


def verdict(groups: Sequence[Group], finished: bool = True) -> str:
    """A sentence that says which group ends best, by how much, and what the seeds decide; one line per setting if there are several."""
    found = []
    for setting, rivals in by_setting(groups).items():  # the setting is named once, so the labels omit it
        rivals = [replace(g, label=algorithm_title(g)) for g in rivals] if setting else rivals
        found.append(f"{setting}: " * bool(setting) + _verdict(rivals, "ends" if finished else "is"))
    return "\n".join(found)


def _verdict(groups: Sequence[Group], ends: str) -> str:
    metric = main_metric(groups)
    groups, few = with_seeds_in_common(groups, metric)
    winner = best(groups, metric)
    if winner is None:
        return "No round has been evaluated yet."
    mean, std = mean_std(winner.finals(metric))
    at = standing(groups, metric)
    if at is None:
        return f"{winner.label} {ends} at {show(metric, mean, std)}."
    level = [g.label for g in groups if g.finals(metric) and equal(winner, g, metric)]
    if len(level) > 1:
        return f"{enumerated(level)} tie at {show(metric, mean)}{few}."
    second = best([g for g in groups if g is not winner], metric)
    assert second is not None
    gap = abs(mean - mean_std(second.finals(metric))[0])
    side = "above" if higher_is_better(metric) else "below"
    points = f"{100 * gap:.1f} points {side}" if percent(metric) else f"{gap:.3g} {side}"
    text = f"{winner.label} {ends} best at {show(metric, mean, std)}, {points} {second.label}{few}"
    shared = at.leads[second.label]
    if shared.pairs < 2:
        return f"{text} ({'one seed' if shared.pairs else 'no seed in common'}, so nothing is tested)."
    few = f" ({shared.pairs} seeds are too few to decide)" if shared.pairs < ENOUGH and at.labels(UNDECIDED) else ""
    return f"{text}, ahead in {shared.ahead} of {shared.pairs} seeds: {_decided(at)}{few}."


def _decided(at: Standing) -> str:
    """What the tests say about the others."""
    if at.mark == FIRST:
        return "first, with a significant lead over " + ("all others" if len(at.outcomes) > 1 else next(iter(at.outcomes)))
    words = {YES: "significantly ahead of", TIE: "tied with", UNDECIDED: "undecided against", NO: "significantly behind"}
    parts = []
    for result, phrase in words.items():
        if labels := at.labels(result):
            parts.append(f"{phrase} {'all others' if len(labels) == len(at.outcomes) > 1 else enumerated(labels)}")
    return ", ".join(parts)


def enumerated(names: Sequence[str]) -> str:
    """`A, B and C`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
