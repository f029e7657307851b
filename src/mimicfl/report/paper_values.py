"""Results of the cells of a table, and MimiC's lead over every other algorithm in a column."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..metrics.curves import swing, tail_mean
from ..metrics.history import History
from ..paper.records import Records
from ..paper.reproduce import Cell
from ..paper.studies import STUDIES
from ..paper.study import Study
from ..significance import FEW, LEVEL, NO, OPEN, TIE, UNDECIDED, YES, Paired, holm, outcome
from .spread import mean_std, signed
from .styles import color_of, dash_of, title_of
from .summary import Group

SAME = 1.0  # points: a tie is a difference that is certainly smaller


@dataclass(frozen=True)
class Value:
    """The recorded runs of a cell by seed, and their accuracies in percent."""

    runs: dict[int, History]

    @property
    def by_seed(self) -> dict[int, float]:
        """After the last round, as the paper reports it."""
        return {seed: 100 * float(run.last("test_accuracy") or 0.0) for seed, run in self.runs.items()}

    @property
    def swings(self) -> dict[int, float]:
        return {seed: 100 * (swing(run.rows) or 0.0) for seed, run in self.runs.items()}

    def tails(self, rounds: int | None = None) -> dict[int, float]:
        """Means over the last tenth of the run, or of its first `rounds` rounds."""
        return {seed: 100 * (tail_mean(run.rows, rounds=rounds) or 0.0) for seed, run in self.runs.items()}

    @property
    def rounds(self) -> int:
        return min(len(run.rows) for run in self.runs.values())

    @property
    def mean(self) -> float:
        return mean_std(list(self.by_seed.values()))[0]

    @property
    def std(self) -> float | None:
        return mean_std(list(self.by_seed.values()))[1]

    @property
    def swing(self) -> float:
        return mean_std(list(self.swings.values()))[0]


Lookup = Callable[[str, str, str], Value | None]  # by study, column and algorithm


def runs_of(cell: Cell, records: Records, seeds: Sequence[int]) -> Group | None:
    """The recorded runs of a cell as a group, or None."""
    runs = cell.found(records, seeds)
    return Group(title_of(cell.algorithm), color_of(cell.algorithm), runs, dash_of(cell.algorithm)) if runs else None


def value(cell: Cell, records: Records, seeds: Sequence[int], scale: float = 1.0) -> Value | None:
    """The results of the recorded runs of a cell, or None."""
    runs = cell.found(records, seeds, scale)
    return Value({int(run.config["seed"]): run for run in runs}) if runs else None


def lookup_in(records: Records, seeds: Sequence[int]) -> Lookup:
    """Find the results of cells in these records; each cell is looked up once, because many verdicts use it."""
    return functools.cache(lambda study, column, algorithm: value(Cell(STUDIES[study], column, algorithm), records, seeds))


@dataclass(frozen=True)
class ColumnResults:
    """Means over the last tenth of the runs of one column, and MimiC's lead over each other algorithm."""

    rounds: int | None  # the number of rounds that count; None: as many as the budget of uploads allows
    tails: dict[str, dict[int, float]]  # by algorithm and seed, in percent
    leads: dict[str, Paired]
    adjusted: dict[str, float]  # p values, adjusted for all comparisons of the table

    def outcome(self, rival: str) -> str:
        """YES or NO if MimiC is ahead or behind with p < 0.05 after Holm, TIE if the two are certainly within a point."""
        return outcome(self.leads[rival], self.adjusted[rival], SAME)

    def lead(self, rival: str) -> str:
        """`+3.5 [+1.0, +6.0]`; significant ones have a star."""
        return f"{interval(self.leads[rival])}{'*' if self.adjusted[rival] < LEVEL and self.leads[rival].pairs > 1 else ''}"


def interval(found: Paired) -> str:
    """A difference in points with its 95 % interval."""
    if not found.pairs:
        return "–"
    low, high = found.interval()
    return signed(found.mean) + (f" [{signed(low)}, {signed(high)}]" if found.pairs > 1 else "")


def worst(outcomes: Sequence[str]) -> str:
    """The outcome of a claim about several comparisons: YES only if all are YES, NO if any is NO."""
    return next((word for word in (OPEN, FEW, NO, UNDECIDED, TIE) if word in outcomes), YES)


def columns_of(study: Study, lookup: Lookup) -> dict[str, dict[str, Value]]:
    """The results of all algorithms by column; empty where an algorithm has none yet."""
    found = {c: {a: v for a in study.algorithms if (v := lookup(study.name, c, a))} for c in study.columns}
    return {c: values if len(values) == len(study.algorithms) else {} for c, values in found.items()}


def comparisons(study: Study, lookup: Lookup, equal_rounds: bool = False) -> dict[str, ColumnResults]:
    """The complete columns of a study, compared over the seeds that all algorithms have; p values are adjusted over all of them."""
    rounds: dict[str, int | None] = {}
    tails: dict[str, dict[str, dict[int, float]]] = {}
    for column, values in columns_of(study, lookup).items():
        seeds = set.intersection(*[set(v.runs) for v in values.values()] or [set()])
        if seeds:
            rounds[column] = min(v.rounds for v in values.values()) if equal_rounds else None
            tails[column] = {a: {s: end for s, end in v.tails(rounds[column]).items() if s in seeds} for a, v in values.items()}
    leads = {(c, a): Paired.between(ends["mimic"], rival) for c, ends in tails.items() for a, rival in ends.items() if a != "mimic"}
    adjusted = holm({key: lead.p for key, lead in leads.items()})
    return {
        c: ColumnResults(rounds[c], ends, {a: leads[c, a] for a in ends if a != "mimic"}, {a: adjusted[c, a] for a in ends if a != "mimic"})
        for c, ends in tails.items()
    }


def costs_differ(study: Study, lookup: Lookup) -> bool:
    """Whether equal uploads are different numbers of rounds: SCAFFOLD sends two vectors per round in the paper."""
    rounds = [[v.rounds for v in values.values()] for values in columns_of(study, lookup).values() if values]
    return any(min(each) < 0.75 * max(each) for each in rounds)  # empty rounds make small differences
