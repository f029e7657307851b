"""What the recorded runs show: means with intervals, which algorithm is best under a pattern, and ranks over all cells."""

import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..significance import LEVEL, Paired, Ranking, friedman, holm, sign_flips
from .grid import Config
from .progress import CellProgress, progress_of
from .records import Results, changes, plans, read_cell
from .suite import ORACLES, Cell, Part, PatternCase

MARGIN = 2.0  # points; an algorithm further behind the best mean is not recommended, however uncertain its own mean is

BySeed = dict[int, float]


@dataclass(frozen=True)
class Tested:
    """The difference between two algorithms: paired t, sign flips, and the p value adjusted over all pairs of the cell."""

    difference: Paired
    flips: float
    adjusted: float


@dataclass(frozen=True)
class Entry:
    """One algorithm under one pattern."""

    algorithm: str
    state: CellProgress
    runs: list[dict[str, Any]]  # of the chosen configuration, one per seed
    chance: float = 0.1  # what a diverged run scores
    unsuited: bool = False  # every configuration of its first grid diverged with every tuning seed

    @property
    def diverged(self) -> int:
        return sum("diverged" in run for run in self.runs)

    def by_seed(self, metric: str = "tail") -> BySeed:
        """A metric in percent by seed; seeds without it are left out."""
        values = {int(run["seed"]): run.get(metric) for run in self.runs}
        found = {seed: 100 * float(value) for seed, value in values.items() if value is not None}
        if metric == "tail":
            found |= {int(run["seed"]): 100 * self.chance for run in self.runs if "diverged" in run}
        return found

    def mean(self, metric: str = "tail") -> float | None:
        values = self.by_seed(metric)
        return statistics.fmean(values.values()) if values else None

    def to_target(self, what: str) -> tuple[float | None, int]:
        """The median cost until the target is reached, over the runs that reach it, and how many do."""
        values = [run[key] for run in self.runs if run.get(key := f"{what}_to_target") is not None]
        return (statistics.median(values) if values else None), len(values)


@dataclass(frozen=True)
class Table:
    """All algorithms under one pattern."""

    part: Part
    pattern: PatternCase
    entries: dict[str, Entry]

    @functools.cached_property
    def tests(self) -> dict[tuple[str, str], Tested]:
        """All pairs of candidates, by (better, worse) mean."""
        pairs = list(itertools.combinations(self.candidates, 2))
        return pairwise({name: self.entries[name].by_seed() for name in self.candidates}, pairs)

    @property
    def complete(self) -> bool:
        return all(entry.state.stage == "complete" for entry in self.entries.values())

    @property
    def order(self) -> list[str]:
        """Algorithms whose runs are complete, best mean first."""
        done = {name: entry for name, entry in self.entries.items() if entry.state.stage == "complete"}
        means = {name: mean for name, entry in done.items() if (mean := entry.mean()) is not None}
        return sorted(means, key=lambda name: -means[name])

    @property
    def candidates(self) -> list[str]:
        """Those of them that a deployment can use."""
        return [name for name in self.order if name not in ORACLES]

    @property
    def best(self) -> list[str]:
        """The candidate with the best mean, and those not significantly worse and within the margin; none before all are complete."""
        if not (order := self.candidates) or self.missing:
            return []
        tests = {name: self.tests[order[0], name] for name in order[1:]}
        return [order[0], *(name for name, test in tests.items() if test.adjusted >= LEVEL and test.difference.mean <= MARGIN)]

    @property
    def missing(self) -> int:
        """How many algorithms that a deployment can use are not complete."""
        return sum(entry.state.stage != "complete" for name, entry in self.entries.items() if name not in ORACLES)


def analyse(part: Part, records: Path) -> list[Table]:
    """One table per pattern, from what is recorded so far."""
    entries: dict[tuple[str, str], Entry] = {}
    for cell in part.cells():
        results = read_cell(records, cell)
        state = progress_of(cell, results)
        entries[cell.pattern.name, cell.grid.algorithm] = Entry(
            cell.grid.algorithm, state, _final(cell, state.chosen, results), part.chance, _unsuited(cell, results)
        )
    return [Table(part, pattern, {g.algorithm: entries[pattern.name, g.algorithm] for g in part.grids}) for pattern in part.patterns]


def _unsuited(cell: Cell, results: Results) -> bool:
    return all("diverged" in results.get(key, {}) for config in cell.grid.configs() for key in cell.tuning(config))


def _final(cell: Cell, chosen: Config | None, results: Results) -> list[dict[str, Any]]:
    return [results[key] for key in cell.final(chosen) if key in results] if chosen else []


def pairwise(values: Mapping[str, BySeed], pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Tested]:
    """Test these pairs over the seeds that both have; Holm over all of them, so that naming the best one afterwards is allowed."""
    differences = {(a, b): [values[a][seed] - values[b][seed] for seed in values[a] if seed in values[b]] for a, b in pairs}
    tests = {pair: Paired.of(each) for pair, each in differences.items()}
    adjusted = holm({pair: test.p for pair, test in tests.items()})
    return {pair: Tested(test, sign_flips(differences[pair]), adjusted[pair]) for pair, test in tests.items()}


def ranking(tables: Sequence[Table]) -> Ranking | None:
    """Ranks over all complete patterns; None with fewer than two."""
    done = [table for table in tables if table.complete]
    if len(done) < 2:
        return None
    return friedman({name: [done_table.entries[name].mean() or 0.0 for done_table in done] for name in done[0].candidates})


def deviations(part: Part, records: Path, tables: Sequence[Table]) -> list[str]:
    """How the records differ from the first plan: amendments, runs under other plans, missing and diverged runs, several environments."""
    versions = plans(records, part)
    if not versions:
        return ["no plan has been written yet"]
    found = [
        f"amended on {now['written'][:10]} ({now['reason']}): {'; '.join(changes(before['plan'], now['plan']))}"
        for before, now in itertools.pairwise(versions)
    ]
    if unplanned := changes(versions[-1]["plan"], part.plan()):
        found.append(f"the suite has changed since the plan: {'; '.join(unplanned)}")
    runs = [run for table in tables for entry in table.entries.values() for run in entry.runs]
    if old := sum(run["plan"] != versions[-1]["hash"] for run in runs):
        found.append(f"{old} of {len(runs)} compared runs were made under an earlier plan")
    if diverged := sum("diverged" in run for run in runs):
        found.append(f"{diverged} of {len(runs)} compared runs diverged")
    unsuited: dict[str, list[str]] = {}
    for table in tables:
        for name, entry in table.entries.items():
            if entry.unsuited:
                unsuited.setdefault(name, []).append(table.pattern.name)
    for name, patterns in unsuited.items():
        found.append(
            f"every configuration of the first grid of {name} diverged under {', '.join(patterns)}: the grid does not suit it there, "
            "and its result says little about the algorithm"
        )
    places = {(run["environment"].get("mimicfl"), run["environment"].get("torch"), _hardware(run)) for run in runs}
    if len(places) > 1:
        found.append("runs come from several environments: " + "; ".join(sorted(" / ".join(map(str, place)) for place in places)))
    waiting = [f"{table.pattern.name} {name}" for table in tables for name, e in table.entries.items() if e.state.stage != "complete"]
    if waiting:
        found.append(f"{len(waiting)} of {len(part.cells())} cells are not complete")
    return found


def _hardware(run: Mapping[str, Any]) -> str:
    made = run["environment"]
    return str(made.get("gpu") or made.get("processor"))
