"""What the paper claims of its experiments, and whether the recorded runs bear it out; every sentence is computed."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..paper.records import Records
from ..paper.reproduce import Cell
from ..paper.studies import STUDIES, Study
from .gap import FEW, NO, OPEN, TIE, YES, Gap, mean_std, signed
from .summary import COLORS, TITLES, Group

FIRST = "MimiC is first"
PRINTED = "The accuracies are those in print"
STEADY = "MimiC and MIFA are steady where FedAvg, FedProx and SCAFFOLD oscillate"
TRIALS = 3  # of the paper, by its Table II


@dataclass(frozen=True)
class Verdict:
    claim: str
    setting: str  # the column it is about, or empty for the whole study
    outcome: str  # YES, TIE, NO, FEW or OPEN
    evidence: str
    study: str

    @property
    def place(self) -> str:
        return STUDIES[self.study].title + (f", {self.setting}" if self.setting else "")


@dataclass(frozen=True)
class Value:
    """Final accuracies of a cell by seed, in percent, and how much each curve still shakes."""

    by_seed: dict[int, float]
    swings: dict[int, float]

    @property
    def mean(self) -> float:
        return mean_std(list(self.by_seed.values()))[0]

    @property
    def std(self) -> float | None:
        return mean_std(list(self.by_seed.values()))[1]

    @property
    def swing(self) -> float:
        return mean_std(list(self.swings.values()))[0]


def worst(outcomes: Sequence[str]) -> str:
    """One word for a claim about several: borne out if all are, not if any is not."""
    return next((word for word in (OPEN, FEW, NO, TIE) if word in outcomes), YES)


def runs_of(cell: Cell, records: Records, seeds: Sequence[int], scale: float = 1.0) -> Group | None:
    """The recorded runs of a cell, ready to be drawn."""
    runs = cell.found(records, seeds, scale)
    return Group(TITLES[cell.algorithm], COLORS[cell.algorithm], runs) if runs else None


def value(cell: Cell, records: Records, seeds: Sequence[int], scale: float = 1.0) -> Value | None:
    group = runs_of(cell, records, seeds, scale)
    if group is None:
        return None
    alone = {int(run.config["seed"]): Group(group.label, group.color, [run]) for run in group.runs}
    finals = {seed: 100 * end for seed, end in group.by_seed("test_accuracy").items()}
    return Value(finals, {seed: 100 * (own.swing("test_accuracy") or 0.0) for seed, own in alone.items()})


def judge(records: Records, seeds: Sequence[int]) -> list[Verdict]:
    """Every claim of Section VI that its tables and figures can answer."""

    def look(study: str, column: str, algorithm: str) -> Value | None:
        return value(Cell(STUDIES[study], column, algorithm), records, seeds)

    return [
        *[v for study in STUDIES.values() if len(study.algorithms) > 1 and study.claimed for v in _first(study, look)],
        *[v for study in STUDIES.values() if study.name.startswith("figure") and study.drawn == "curves" for v in _stable(study, look)],
        _trend("table-3", "Accuracy falls as tau_max grows", -1, look),
        _trend("table-4-fmnist", "Accuracy rises with P", 1, look),
        _trend("table-4-cifar10", "Accuracy rises with P", 1, look),
        _trend("figure-6", "Accuracy rises with p", 1, look),
        _trend("table-5", "More classes a client make all algorithms better", 1, look),
        _less_loss(look),
        *[_in_print(s, look) for s in STUDIES.values() if len(s.algorithms) > 1 and s.claimed and s.published],
        *[_reference(name, look) for name in ("no-dropouts-fmnist", "no-dropouts-cifar10")],
    ]


Look = Callable[[str, str, str], Value | None]


def _columns(study: Study, look: Look) -> Iterator[tuple[str, str, dict[str, Value]]]:
    """Each column with how it is called and what all algorithms reached in it; nothing until all are there."""
    for column in study.columns:
        found = {a: v for a in study.algorithms if (v := look(study.name, column, a))}
        yield column, study.place(column), found if len(found) == len(study.algorithms) else {}


def _first(study: Study, look: Look) -> Iterator[Verdict]:
    for column, where, found in _columns(study, look):
        seeds = set.intersection(*[set(v.by_seed) for v in found.values()] or [set()])  # of all, so that nobody is judged by other seeds
        if not seeds:
            yield Verdict(FIRST, where, OPEN, "", study.name)
            continue
        ends = {a: {seed: v.by_seed[seed] for seed in seeds} for a, v in found.items()}
        gaps = {a: Gap.of(ends["mimic"], own) for a, own in ends.items() if a != "mimic"}
        second = min(gaps, key=lambda a: gaps[a].points)
        lead = gaps[second]
        text = f"{lead} points against {TITLES[second]}, the best of the others, ahead in {lead.ahead} of {lead.seeds}"
        yield Verdict(
            FIRST, where, lead.outcome, f"{text} {'seed' if lead.seeds == 1 else 'seeds'}{_published_lead(study, column)}", study.name
        )


def _published_lead(study: Study, column: str) -> str:
    printed = {a: row[column][0] for a, row in study.published.items() if column in row}
    if "mimic" not in printed or len(printed) < 2:
        return ""
    others = {a: mean for a, mean in printed.items() if a != "mimic"}
    second = max(others, key=others.__getitem__)
    return f"; the paper: +{printed['mimic'] - others[second]:.1f} against {TITLES[second]}"


def _stable(study: Study, look: Look) -> Iterator[Verdict]:
    for _, where, found in _columns(study, look):
        if not found:
            yield Verdict(STEADY, where, OPEN, "", study.name)
            continue
        pairs = itertools.product(("fedavg", "fedprox", "scaffold"), ("mifa", "mimic"))
        outcome = worst([Gap.of(found[loose].swings, found[steady].swings).outcome for loose, steady in pairs])
        text = "accuracy swings in the last quarter by " + ", ".join(f"{TITLES[a]} {v.swing:.1f}" for a, v in found.items()) + " points"
        yield Verdict(STEADY, where, outcome, text, study.name)


def _moves(name: str, look: Look) -> dict[str, Gap]:
    """How far each algorithm's accuracy moves from the first column to the last; without those not run yet."""
    first, *_, last = STUDIES[name].columns
    ends = {a: (look(name, first, a), look(name, last, a)) for a in STUDIES[name].algorithms}
    gaps = {a: Gap.of(b.by_seed, f.by_seed) for a, (f, b) in ends.items() if f and b}
    return {a: gap for a, gap in gaps.items() if gap.seeds}


def _trend(name: str, claim: str, sign: int, look: Look) -> Verdict:
    """Does every algorithm's accuracy move this way from the first column to the last?"""
    study, moves = STUDIES[name], _moves(name, look)
    if len(moves) < len(study.algorithms):
        return Verdict(claim, "", OPEN, "", name)
    first, *_, last = study.columns
    outcome = worst([Gap(sign * move.points, move.error, move.seeds).outcome for move in moves.values()])
    return Verdict(claim, "", outcome, f"from {first} to {last}: " + ", ".join(f"{TITLES[a]} {move}" for a, move in moves.items()), name)


def _less_loss(look: Look) -> Verdict:
    """Held to their means: in the paper's own table FedAvg loses exactly as much as MimiC."""
    claim = "From tau_max = 20 to 100, MimiC and MIFA lose less than the others do on average"
    moves = _moves("table-3", look)
    if len(moves) < len(STUDIES["table-3"].algorithms):
        return Verdict(claim, "", OPEN, "", "table-3")
    others = sum(moves[a].points for a in ("fedavg", "fedprox", "scaffold")) / 3
    outcome = YES if min(moves["mimic"].points, moves["mifa"].points) > others else NO
    return Verdict(claim, "", outcome, ", ".join(f"{TITLES[a]} {move}" for a, move in moves.items()), "table-3")


def _in_print(study: Study, look: Look) -> Verdict:
    """Cell by cell, where there are two seeds or more. With three, chance alone puts one cell in eight beyond two standard errors.

    YES for no more than that, NO for so many that chance would do it in less than one table of twenty.
    """
    found = {(a, c): v for a in study.algorithms for c in study.columns if (v := look(study.name, c, a))}
    known = {key: v for key, v in found.items() if v.std is not None}
    if not known:
        return Verdict(PRINTED, "", FEW if found else OPEN, "", study.name)
    off, near, bare = {}, 0, False
    for (a, c), v in known.items():
        mean, std = study.published[a][c]
        own = v.std or 0.0
        theirs, bare = (own, True) if std is None else (std, bare)
        off[a, c] = v.mean - mean
        near += abs(off[a, c]) <= 2 * math.sqrt(own**2 / len(v.by_seed) + theirs**2 / TRIALS) + 1e-9
    a, c = max(off, key=lambda key: abs(off[key]))
    text = f"{near} of {len(off)} within two standard errors" + bare * " (the paper prints none: ours for both)"
    text += f"; by {signed(sum(off.values()) / len(off))} points on average, by {signed(off[a, c])} for {TITLES[a]} at {study.place(c)}"
    n, far = len(off), len(off) - near
    chance = sum(math.comb(n, k) * 0.125**k * 0.875 ** (n - k) for k in range(far, n + 1))
    return Verdict(PRINTED, "", YES if far <= n / 8 else TIE if chance > 0.05 else NO, text, study.name)


def _reference(name: str, look: Look) -> Verdict:
    study = STUDIES[name]
    column = next(iter(study.columns))
    printed = study.published["fedavg"][column][0]
    claim = f"FedAvg without dropouts reaches {printed} %"
    found = look(name, column, "fedavg")
    if found is None:
        return Verdict(claim, "", OPEN, "", name)
    gap = Gap.of(found.by_seed, dict.fromkeys(found.by_seed, printed))
    outcome = YES if gap.points >= 0 else gap.outcome
    return Verdict(claim, "", outcome, f"{found.mean:.1f} %, {gap} points", name)
