"""The claims of the paper about its experiments, and whether the recorded runs confirm them. All sentences are computed."""

import itertools
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..paper.studies import STUDIES
from ..paper.study import Study
from ..significance import FEW, LEVEL, NO, OPEN, UNDECIDED, YES, Paired, holm, outcome
from .paper_values import (
    ColumnResults,
    Lookup,
    Value,
    columns_of,
    comparisons,
    costs_differ,
    interval,
    worst,
)
from .spread import signed
from .styles import title_of

FIRST = "MimiC is first, at the paper's number of uploads"
FIRST_ROUNDS = "MimiC is first at equal rounds"
PRINTED = "The accuracies agree with the published ones"
STEADY = "MimiC and MIFA are stable where FedAvg, FedProx and SCAFFOLD oscillate"
LESS = "From tau_max = 20 to 100, MimiC and MIFA each lose less accuracy than the mean of the other three"
TRIALS = 3  # in the paper, see its Table II
AS_PRINTED = 2.0  # points: our mean agrees with the printed one if the difference is certainly smaller


@dataclass(frozen=True)
class Verdict:
    claim: str
    setting: str  # the column it is about, or empty for the whole study
    outcome: str  # YES, TIE, NO, UNDECIDED, FEW or OPEN
    evidence: str
    study: str
    of_the_paper: bool = True  # False for a study that is not in the paper

    @property
    def place(self) -> str:
        return STUDIES[self.study].title + (f", {self.setting}" if self.setting else "")


def judge(lookup: Lookup) -> list[Verdict]:
    """Verdicts on every claim of Section VI that its tables and figures can decide."""
    tables = [study for study in STUDIES.values() if len(study.algorithms) > 1]
    return [
        *[v for study in tables for v in _first(study, lookup)],
        *[v for study in tables if study.name.startswith("figure") and study.drawn == "curves" for v in _stability(study, lookup)],
        _trend("table-3", "Accuracy falls as tau_max grows", -1, lookup),
        _trend("table-4-fmnist", "Accuracy rises with P", 1, lookup),
        _trend("table-4-cifar10", "Accuracy rises with P", 1, lookup),
        _trend("figure-6", "Accuracy rises with p", 1, lookup),
        _trend("table-5", "More classes per client improve all algorithms", 1, lookup),
        _less_loss(lookup),
        *[_agreement(study, lookup) for study in STUDIES.values() if study.claimed and study.published],
    ]


def _first(study: Study, lookup: Lookup) -> Iterator[Verdict]:
    """YES only where MimiC is ahead of every other algorithm with p < 0.05, adjusted for all comparisons of the table."""
    for claim, equal_rounds in ((FIRST, False), (FIRST_ROUNDS, True)):
        if equal_rounds and not costs_differ(study, lookup):
            continue
        found = comparisons(study, lookup, equal_rounds)
        for column in study.columns:
            in_paper = study.claimed and not _shown_by(study, column)
            if (here := found.get(column)) is None:
                yield Verdict(claim, study.place(column), OPEN, "", study.name, in_paper)
                continue
            result = worst([here.outcome(a) for a in here.leads])
            yield Verdict(claim, study.place(column), result, _first_text(study, column, here), study.name, in_paper)


def _first_text(study: Study, column: str, here: ColumnResults) -> str:
    """MimiC's lead over the best of the others, and how many leads are significant."""
    second = min(here.leads, key=lambda a: here.leads[a].mean)
    lead = here.leads[second]
    text = f"{interval(lead)} points against {title_of(second)}, the best of the others, ahead in {lead.ahead} of {lead.pairs}"
    text += f" {'seed' if lead.pairs == 1 else 'seeds'}"
    if lead.pairs > 1:
        text += (
            f", {_p(here.adjusted[second])}; ahead of {sum(here.outcome(a) == YES for a in here.leads)} of {len(here.leads)} with p < 0.05"
        )
    return text + (f"; over {here.rounds} rounds" if here.rounds else _published_lead(study, column))


def _p(adjusted: float) -> str:
    return "p < 0.001 after Holm" if adjusted < 0.001 else f"p = {adjusted:.2g} after Holm"


def _shown_by(study: Study, column: str) -> bool:
    """Whether another table of the paper has the same column with more algorithms, so that the setting counts once."""
    others = [s for s in STUDIES.values() if s.claimed and s.dataset == study.dataset and set(s.algorithms) > set(study.algorithms)]
    return any(study.columns[column] in other.columns.values() for other in others)


def _published_lead(study: Study, column: str) -> str:
    printed = {a: row[column][0] for a, row in study.published.items() if column in row}
    if "mimic" not in printed or len(printed) < 2:
        return ""
    others = {a: mean for a, mean in printed.items() if a != "mimic"}
    second = max(others, key=others.__getitem__)
    return f"; the paper: {signed(printed['mimic'] - others[second])} against {title_of(second)}"


def _decide(tests: Mapping[str, Paired]) -> str:
    """The outcome of a claim that needs every one of these differences to be positive; p values are adjusted for their number."""
    adjusted = holm({name: test.p for name, test in tests.items()})
    return worst([outcome(test, adjusted[name], margin=None) for name, test in tests.items()])


def _stability(study: Study, lookup: Lookup) -> Iterator[Verdict]:
    for column, found in columns_of(study, lookup).items():
        if not found:
            yield Verdict(STEADY, study.place(column), OPEN, "", study.name)
            continue
        pairs = itertools.product(("fedavg", "fedprox", "scaffold"), ("mifa", "mimic"))
        result = _decide({f"{loose} {steady}": Paired.between(found[loose].swings, found[steady].swings) for loose, steady in pairs})
        swings = ", ".join(f"{title_of(a)} {v.swing:.1f}" for a, v in found.items())
        text = f"standard deviation over the last quarter of the rounds: {swings} points"
        yield Verdict(STEADY, study.place(column), result, text, study.name)


def _moves(name: str, lookup: Lookup) -> dict[str, Paired]:
    """How much the accuracy of each algorithm changes from the first column to the last; only algorithms that have been run."""
    first, *_, last = STUDIES[name].columns
    ends = {a: (lookup(name, first, a), lookup(name, last, a)) for a in STUDIES[name].algorithms}
    moves = {a: Paired.between(b.tails(), f.tails()) for a, (f, b) in ends.items() if f and b}
    return {a: move for a, move in moves.items() if move.pairs}


def _trend(name: str, claim: str, sign: int, lookup: Lookup) -> Verdict:
    """Whether the accuracy of every algorithm changes in this direction from the first column to the last. Names opposite steps between."""
    study, moves = STUDIES[name], _moves(name, lookup)
    if len(moves) < len(study.algorithms):
        return Verdict(claim, "", OPEN, "", name)
    first, *_, last = study.columns
    result = _decide({a: replace(move, mean=sign * move.mean) for a, move in moves.items()})
    text = f"from {first} to {last}: " + ", ".join(f"{title_of(a)} {interval(move)}" for a, move in moves.items())
    back = [
        f"{title_of(a)} {signed(step)} from {b} to {e}"
        for a in study.algorithms
        for b, e in itertools.pairwise(study.columns)
        if (begin := lookup(name, b, a)) and (end := lookup(name, e, a))
        if sign * (step := _tail(end) - _tail(begin)) < -0.05
    ]
    return Verdict(claim, "", result, text + ("; in the opposite direction: " if back else "") + ", ".join(back), name)


def _tail(found: Value) -> float:
    return statistics.fmean(found.tails().values())


def _less_loss(lookup: Lookup) -> Verdict:
    """Compare with the mean of the others, because in the paper's own table FedAvg alone loses exactly as much as MimiC."""
    study = STUDIES["table-3"]
    first, *_, last = study.columns
    lost: dict[str, dict[int, float]] = {}
    for a in study.algorithms:
        begin, end = lookup(study.name, first, a), lookup(study.name, last, a)
        before, after = (v.tails() if v else {} for v in (begin, end))
        lost[a] = {s: after[s] - before[s] for s in before if s in after}
    others = [lost[a] for a in ("fedavg", "fedprox", "scaffold")]
    mean = {s: sum(loss[s] for loss in others) / 3 for s in set.intersection(*map(set, others))}
    gaps = {a: Paired.between(lost[a], mean) for a in ("mifa", "mimic")}
    text = ", ".join(f"{title_of(a)} {interval(gap)} points better" for a, gap in gaps.items() if gap.pairs)
    return Verdict(LESS, "", _decide(gaps), text, study.name)


def _agreement(study: Study, lookup: Lookup) -> Verdict:
    """YES if every cell is equivalent to the printed one within AS_PRINTED, NO if one differs with p < 0.05 after Holm."""
    cells = [(a, c) for a in study.algorithms for c in study.columns if c in study.published.get(a, {})]
    found = {(a, c): v for a, c in cells if (v := lookup(study.name, c, a))}
    known = {key: v for key, v in found.items() if v.std is not None}
    if not known:
        return Verdict(PRINTED, "", FEW if found else OPEN, "", study.name)
    tests = {(a, c): _against_print(v, *study.published[a][c]) for (a, c), v in known.items()}
    adjusted = holm({key: test.p for key, test in tests.items()})
    off = {key for key in tests if adjusted[key] < LEVEL}
    same = {key for key, test in tests.items() if key not in off and test.equivalence(AS_PRINTED) < LEVEL}
    a, c = max(tests, key=lambda key: abs(tests[key].mean))
    text = f"of {len(tests)} {'cell' if len(tests) == 1 else 'cells'}, {len(same)} agree within {AS_PRINTED:g} points, {len(off)} differ, "
    text += f"{len(tests) - len(same) - len(off)} are undecided; the mean difference is "
    text += f"{statistics.fmean(abs(test.mean) for test in tests.values()):.1f}, the largest {abs(tests[a, c].mean):.1f}"
    text += f" ({title_of(a)}, {study.place(c)})"
    text += (
        "" if all(study.published[a][c][1] is not None for a, c in known) else "; where the paper gives no spread, ours is used for both"
    )
    text += "" if len(known) == len(cells) else f"; {len(cells) - len(known)} cells have not been run yet"
    return Verdict(PRINTED, "", NO if off else YES if len(same) == len(tests) else UNDECIDED, text, study.name)


def _against_print(ours: Value, mean: float, std: float | None) -> Paired:
    """Our runs against a printed mean: independent samples, since seeds are not shared with the paper."""
    own = ours.std or 0.0
    return Paired.welch((ours.mean, own, len(ours.runs)), (mean, own if std is None else std, TRIALS))
