"""What the paper claims of its experiments, and whether the recorded runs bear it out; every sentence is computed."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..paper.records import Records
from ..paper.reproduce import Cell
from ..paper.studies import STUDIES
from ..paper.study import Study
from .gap import FEW, NO, OPEN, TIE, YES, Gap, mean_std, signed
from .styles import COLORS, own_dash
from .summary import TITLES, Group

FIRST = "MimiC is first"
PRINTED = "The accuracies agree with those in print"
STEADY = "MimiC and MIFA are steady where FedAvg, FedProx and SCAFFOLD oscillate"
LESS = "From tau_max = 20 to 100, MimiC and MIFA each lose less than the mean of the other three"
TRIALS = 3  # of the paper, by its Table II


@dataclass(frozen=True)
class Verdict:
    claim: str
    setting: str  # the column it is about, or empty for the whole study
    outcome: str  # YES, TIE, NO, FEW or OPEN
    evidence: str
    study: str
    of_the_paper: bool = True  # or of a study that the paper has not

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
    return Group(TITLES[cell.algorithm], COLORS[cell.algorithm], runs, own_dash(cell.algorithm)) if runs else None


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

    tables = [study for study in STUDIES.values() if len(study.algorithms) > 1]
    return [
        *[v for study in tables for v in _first(study, look)],
        *[v for study in tables if study.name.startswith("figure") and study.drawn == "curves" for v in _stable(study, look)],
        _trend("table-3", "Accuracy falls as tau_max grows", -1, look),
        _trend("table-4-fmnist", "Accuracy rises with P", 1, look),
        _trend("table-4-cifar10", "Accuracy rises with P", 1, look),
        _trend("figure-6", "Accuracy rises with p", 1, look),
        _trend("table-5", "More classes a client make all algorithms better", 1, look),
        _less_loss(look),
        *[_in_print(study, look) for study in STUDIES.values() if study.claimed and study.published],
    ]


Look = Callable[[str, str, str], Value | None]


def _columns(study: Study, look: Look) -> Iterator[tuple[str, str, dict[str, Value]]]:
    """Each column with how it is called and what all algorithms reached in it; nothing until all are there."""
    for column in study.columns:
        found = {a: v for a in study.algorithms if (v := look(study.name, column, a))}
        yield column, study.place(column), found if len(found) == len(study.algorithms) else {}


def _first(study: Study, look: Look) -> Iterator[Verdict]:
    """YES only where MimiC leads every other algorithm beyond the error of that lead."""
    for column, where, found in _columns(study, look):
        own = study.claimed and not _shown_by(study, column)
        seeds = set.intersection(*[set(v.by_seed) for v in found.values()] or [set()])  # of all, so that nobody is judged by other seeds
        if not seeds:
            yield Verdict(FIRST, where, OPEN, "", study.name, own)
            continue
        ends = {a: {seed: v.by_seed[seed] for seed in seeds} for a, v in found.items()}
        gaps = {a: Gap.of(ends["mimic"], rival) for a, rival in ends.items() if a != "mimic"}
        second = min(gaps, key=lambda a: gaps[a].points)
        lead = gaps[second]
        text = f"{lead} points against {TITLES[second]}, the best of the others, ahead in {lead.ahead} of {lead.seeds}"
        text += f" {'seed' if lead.seeds == 1 else 'seeds'}{_published_lead(study, column)}"
        yield Verdict(FIRST, where, worst([gap.outcome for gap in gaps.values()]), text, study.name, own)


def _shown_by(study: Study, column: str) -> bool:
    """Does another table of the paper have this very column, with more algorithms? A setting counts once."""
    others = [s for s in STUDIES.values() if s.claimed and s.dataset == study.dataset and set(s.algorithms) > set(study.algorithms)]
    return any(study.columns[column] in other.columns.values() for other in others)


def _published_lead(study: Study, column: str) -> str:
    printed = {a: row[column][0] for a, row in study.published.items() if column in row}
    if "mimic" not in printed or len(printed) < 2:
        return ""
    others = {a: mean for a, mean in printed.items() if a != "mimic"}
    second = max(others, key=others.__getitem__)
    return f"; the paper: {signed(printed['mimic'] - others[second])} against {TITLES[second]}"


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
    """Does every algorithm's accuracy move this way from the first column to the last? Steps between that do not are named."""
    study, moves = STUDIES[name], _moves(name, look)
    if len(moves) < len(study.algorithms):
        return Verdict(claim, "", OPEN, "", name)
    first, *_, last = study.columns
    outcome = worst([Gap(sign * move.points, move.error, move.seeds).outcome for move in moves.values()])
    text = f"from {first} to {last}: " + ", ".join(f"{TITLES[a]} {move}" for a, move in moves.items())
    back = [
        f"{TITLES[a]} {signed(end.mean - begin.mean)} from {b} to {e}"
        for a in study.algorithms
        for b, e in itertools.pairwise(study.columns)
        if (begin := look(name, b, a)) and (end := look(name, e, a)) and sign * (end.mean - begin.mean) < -0.05
    ]
    return Verdict(claim, "", outcome, text + ("; against it " if back else "") + ", ".join(back), name)


def _less_loss(look: Look) -> Verdict:
    """Held to the mean of the others: in the paper's own table FedAvg loses exactly as much as MimiC."""
    study = STUDIES["table-3"]
    first, *_, last = study.columns
    lost: dict[str, dict[int, float]] = {}
    for a in study.algorithms:
        begin, end = look(study.name, first, a), look(study.name, last, a)
        lost[a] = {s: end.by_seed[s] - begin.by_seed[s] for s in begin.by_seed if s in end.by_seed} if begin and end else {}
    others = [lost[a] for a in ("fedavg", "fedprox", "scaffold")]
    mean = {s: sum(own[s] for own in others) / 3 for s in set.intersection(*map(set, others))}
    gaps = {a: Gap.of(lost[a], mean) for a in ("mifa", "mimic")}
    text = ", ".join(f"{TITLES[a]} {gap} points better" for a, gap in gaps.items() if gap.seeds)
    return Verdict(LESS, "", worst([gap.outcome for gap in gaps.values()]), text, study.name)


def _in_print(study: Study, look: Look) -> Verdict:
    """Cell by cell, where there are two seeds or more: YES if all are within two standard errors, NO if more than a quarter is not."""
    cells = [(a, c) for a in study.algorithms for c in study.columns if c in study.published.get(a, {})]
    found = {(a, c): v for a, c in cells if (v := look(study.name, c, a))}
    known = {key: v for key, v in found.items() if v.std is not None}
    if not known:
        return Verdict(PRINTED, "", FEW if found else OPEN, "", study.name)
    off: dict[tuple[str, str], float] = {}
    room: dict[tuple[str, str], float] = {}
    for (a, c), v in known.items():
        mean, std = study.published[a][c]
        own = v.std or 0.0
        off[a, c] = abs(v.mean - mean)
        room[a, c] = 2 * math.sqrt(own**2 / len(v.by_seed) + (own if std is None else std) ** 2 / TRIALS)
    far = sum(off[key] > room[key] + 1e-9 for key in off)
    a, c = max(off, key=off.__getitem__)
    wide = f"{statistics.median(room.values()):.1f} points"
    bare = "" if all(study.published[a][c][1] is not None for a, c in known) else " (no spread is printed; ours stands for both)"
    if len(off) == 1:
        text = f"they differ by {off[a, c]:.1f}, two standard errors are {wide}{bare}"
    else:
        text = f"{len(off) - far} of {len(off)} cells within two standard errors, in the median {wide}{bare}; "
        text += f"they differ by {statistics.mean(off.values()):.1f} on average, at most by {off[a, c]:.1f} ({TITLES[a]}, {study.place(c)})"
    text += "" if len(known) == len(cells) else f"; {len(cells) - len(known)} cells are not run yet"
    return Verdict(PRINTED, "", NO if far > len(off) / 4 else TIE if far else YES, text, study.name)
