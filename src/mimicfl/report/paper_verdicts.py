"""What the paper claims of its experiments, and whether the recorded runs bear it out; every sentence is computed."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..paper.records import Records
from ..paper.reproduce import Cell
from ..paper.studies import STUDIES, Study
from .summary import COLORS, TITLES, Group, mean_std

FIRST = "MimiC is first"
STEADY = "MimiC and MIFA are steady where FedAvg, FedProx and SCAFFOLD oscillate"
YES, TIE, NO, OPEN = "yes", "within chance", "no", "not run yet"


@dataclass(frozen=True)
class Verdict:
    claim: str
    setting: str  # the column it is about, or empty for the whole study
    outcome: str  # YES, TIE, NO or OPEN
    evidence: str
    study: str

    @property
    def place(self) -> str:
        return STUDIES[self.study].title + (f", {self.setting}" if self.setting else "")


@dataclass(frozen=True)
class Value:
    """Final accuracies of a cell by seed, in percent, and how much its curves still shake."""

    by_seed: dict[int, float]
    swing: float

    @property
    def finals(self) -> list[float]:
        return list(self.by_seed.values())

    @property
    def mean(self) -> float:
        return mean_std(self.finals)[0]

    @property
    def std(self) -> float | None:
        return mean_std(self.finals)[1]

    @property
    def error(self) -> float:
        """The standard error of the mean; of one seed nothing is known."""
        return standard_error(self.finals)

    def lead(self, other: "Value") -> tuple[float, float]:
        """How far ahead, and the standard error of that, seed by seed: both share a seed's split, schedule and first model."""
        pairs = [self.by_seed[seed] - other.by_seed[seed] for seed in self.by_seed if seed in other.by_seed]
        return self.mean - other.mean, standard_error(pairs)


def standard_error(values: Sequence[float]) -> float:
    std = mean_std(values)[1]
    return math.inf if std is None else std / math.sqrt(len(values))


def runs_of(cell: Cell, records: Records, seeds: Sequence[int], scale: float = 1.0) -> Group | None:
    """The recorded runs of a cell, ready to be drawn."""
    runs = cell.found(records, seeds, scale)
    return Group(TITLES[cell.algorithm], COLORS[cell.algorithm], runs) if runs else None


def value(cell: Cell, records: Records, seeds: Sequence[int], scale: float = 1.0) -> Value | None:
    group = runs_of(cell, records, seeds, scale)
    if group is None:
        return None
    finals = {int(run.config["seed"]): 100 * float(run.last("test_accuracy")) for run in group.runs}
    return Value(finals, 100 * (group.swing("test_accuracy") or 0.0))


def judge(records: Records, seeds: Sequence[int]) -> list[Verdict]:
    """Every claim of Section VI that its tables and figures can answer."""

    def look(study: str, column: str, algorithm: str) -> Value | None:
        return value(Cell(STUDIES[study], column, algorithm), records, seeds)

    return [
        *[v for study in STUDIES.values() if len(study.algorithms) > 1 and study.claimed for v in _first(study, look)],
        *[v for study in STUDIES.values() if study.drawn == "curves" for v in _stable(study, look)],
        _trend("table-3", "Accuracy falls as tau_max grows", -1, look),
        _trend("table-4-fmnist", "Accuracy rises with P", 1, look),
        _trend("table-4-cifar10", "Accuracy rises with P", 1, look),
        _trend("figure-6", "Accuracy rises with p", 1, look),
        _trend("table-5", "More classes a client make all algorithms better", 1, look),
        _less_loss(look),
        *[_reference(name, look) for name in ("no-dropouts-fmnist", "no-dropouts-cifar10")],
    ]


Look = Callable[[str, str, str], Value | None]


def _first(study: Study, look: Look) -> Iterator[Verdict]:
    for column in study.columns:
        where = f"{study.head} = {column}"
        found = {a: v for a in study.algorithms if (v := look(study.name, column, a))}
        if "mimic" not in found or len(found) < 2:
            yield Verdict(FIRST, where, OPEN, "", study.name)
            continue
        ours = found.pop("mimic")
        second = max(found, key=lambda a: found[a].mean)
        lead, error = ours.lead(found[second])
        outcome = TIE if abs(lead) <= error else YES if lead > 0 else NO
        spread = f"standard error {error:.1f}, seed by seed" if math.isfinite(error) else "one seed: chance is not known"
        text = f"{'+' if lead >= 0 else '−'}{abs(lead):.1f} points against {TITLES[second]} (the best of the others; {spread})"
        yield Verdict(FIRST, where, outcome, text + _published_lead(study, column), study.name)


def _published_lead(study: Study, column: str) -> str:
    printed = {a: row[column][0] for a, row in study.published.items() if column in row}
    if "mimic" not in printed or len(printed) < 2:
        return ""
    others = {a: mean for a, mean in printed.items() if a != "mimic"}
    second = max(others, key=others.__getitem__)
    return f"; the paper: +{printed['mimic'] - others[second]:.1f} against {TITLES[second]}"


def _stable(study: Study, look: Look) -> Iterator[Verdict]:
    for column in study.columns:
        where = f"{study.head} = {column}"
        found = {a: v.swing for a in study.algorithms if (v := look(study.name, column, a))}
        if len(found) < len(study.algorithms):
            yield Verdict(STEADY, where, OPEN, "", study.name)
            continue
        steady, shaking = max(found["mimic"], found["mifa"]), min(found[a] for a in ("fedavg", "fedprox", "scaffold"))
        text = "accuracy swings in the last quarter by " + ", ".join(f"{TITLES[a]} {swing:.1f}" for a, swing in found.items()) + " points"
        yield Verdict(STEADY, where, YES if steady < shaking else NO, text, study.name)


def _trend(name: str, claim: str, sign: int, look: Look) -> Verdict:
    """Does every algorithm's accuracy move this way from the first column to the last?"""
    study = STUDIES[name]
    first, *_, last = study.columns
    ends = {a: (look(name, first, a), look(name, last, a)) for a in study.algorithms}
    moves = {a: sign * (b.mean - f.mean) for a, (f, b) in ends.items() if f and b}
    if len(moves) < len(ends):
        return Verdict(claim, "", OPEN, "", name)
    within = {a: math.hypot(f.error, b.error) for a, (f, b) in ends.items() if f and b}
    outcome = YES if all(m > 0 for m in moves.values()) else NO if any(m < -within[a] for a, m in moves.items()) else TIE
    text = f"from {first} to {last}: " + ", ".join(f"{TITLES[a]} {sign * move:+.1f}" for a, move in moves.items())
    return Verdict(claim, "", outcome, text, name)


def _less_loss(look: Look) -> Verdict:
    claim = "MimiC and MIFA lose less than the others from tau_max = 20 to 100"
    loss = {}
    for a in STUDIES["table-3"].algorithms:
        few, many = look("table-3", "20", a), look("table-3", "100", a)
        if few and many:
            loss[a] = few.mean - many.mean
    if len(loss) < len(STUDIES["table-3"].algorithms):
        return Verdict(claim, "", OPEN, "", "table-3")
    holds = max(loss["mimic"], loss["mifa"]) < min(loss[a] for a in ("fedavg", "fedprox", "scaffold"))
    return Verdict(
        claim, "", YES if holds else NO, "lost: " + ", ".join(f"{TITLES[a]} {points:.1f}" for a, points in loss.items()), "table-3"
    )


def _reference(name: str, look: Look) -> Verdict:
    study = STUDIES[name]
    column = next(iter(study.columns))
    printed = study.published["fedavg"][column][0]
    claim = f"FedAvg without dropouts reaches {printed} %"
    found = look(name, column, "fedavg")
    if found is None:
        return Verdict(claim, "", OPEN, "", name)
    gap = found.mean - printed
    outcome = YES if gap >= 0 else TIE if -gap <= found.error else NO
    return Verdict(claim, "", outcome, f"{found.mean:.1f} %, {gap:+.1f} points", name)
