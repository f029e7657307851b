"""Run what is missing of the paper's experiments, piece by piece, and keep a record of every run that is finished."""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import runner
from ..config import Experiment
from ..engine.checks import pick_device
from ..errors import Diverged, UsageError, nearest, number
from ..metrics.history import History
from ..metrics.store import RunFolder
from ..registry import parse
from ..sweep import carry_out
from ..sweep.fuse import Notice, Plan
from .records import Records, keep, prepare, short
from .studies import Study

# Lanes fixed, so that a run's bits do not depend on which other runs it shares the GPU with.
GPU_ENGINES = {"fmnist": "batched:160:compiled", "cifar10": "streams:15:compiled"}
MOST_RUNS = 45  # in a piece: a table of three columns


@dataclass(frozen=True)
class Cell:
    """One algorithm in one column of a study."""

    study: Study
    column: str
    algorithm: str

    def found(self, records: Records, seeds: Sequence[int], scale: float = 1.0) -> list[History]:
        runs = [records.get(self.study.experiment(self.column, self.algorithm, seed, scale).id) for seed in seeds]
        return [run for run in runs if run is not None]


def cells(studies: Sequence[Study], columns: Sequence[str] = (), algorithms: Sequence[str] = ()) -> Iterator[Cell]:
    """All cells of these studies, or those of the named columns and algorithms."""
    for name, known in (("column", [c for s in studies for c in s.columns]), ("algorithm", [a for s in studies for a in s.algorithms])):
        for word in columns if name == "column" else algorithms:
            if word not in known:
                raise UsageError(f"there is no {name} {word!r} in {', '.join(s.name for s in studies)}; {nearest(word, known)}")
    for study in studies:
        for column in study.columns:
            for algorithm in study.algorithms:
                if (not columns or column in columns) and (not algorithms or algorithm in algorithms):
                    yield Cell(study, column, algorithm)


def plan_of(wanted: Sequence[Cell], seeds: Sequence[int], scale: float, settings: dict[str, Any]) -> Plan:
    """Every run once, however many cells show it, under its own name."""
    runs = [cell.study.experiment(cell.column, cell.algorithm, seed, scale) for cell in wanted for seed in seeds]
    if not runs:
        raise UsageError("nothing is asked for: no column, algorithm or seed is left")
    return {e.name: placed(e, settings) for e in runs}


def placed(experiment: Experiment, settings: dict[str, Any]) -> Experiment:
    """The same run on the device asked for."""
    device = pick_device(str(settings.get("device", experiment.device)))
    fixed = GPU_ENGINES.get(parse(experiment.dataset)[0]) if device.type == "cuda" else None
    return dataclasses.replace(experiment, **({"engine": fixed} if fixed else {}) | settings | {"device": str(device)})


def pieces(plan: Plan) -> list[Plan]:
    """What runs together, minutes on a good GPU: small models by the dozen, of a large one the algorithms of one seed and column."""
    found: dict[Any, Plan] = {}
    for name, e in plan.items():
        own = () if e.model == "lenet" else (e.availability, e.partition, e.seed)
        found.setdefault((e.dataset, own), {})[name] = e
    runs = [list(piece.items()) for piece in found.values()]
    return [dict(piece[k : k + MOST_RUNS]) for piece in runs for k in range(0, len(piece), MOST_RUNS)]


def reproduce(
    plan: Plan,
    out: Path,
    records: Path | None,
    minutes: float | None = None,
    progress: runner.Reporter | None = None,
    notice: Notice | None = None,
) -> tuple[int, list[str]]:
    """Carry the plan out and record what is finished, also when stopped in between.

    Returns how many runs are left, and a sentence for each piece in which runs diverged. After `minutes` no new piece is begun.
    Without `records` nothing is recorded (scaled runs are not the paper's).
    """
    if minutes is not None:
        number("--minutes", minutes, low=0)
    if records is not None:
        prepare(records)
    for e in {e.dataset: e for e in plan.values()}.values():
        runner.settle(e)  # a dataset that is missing is better found out now than in an hour
    began, failures, left = time.monotonic(), [], len(plan)
    for piece in pieces(plan):
        if minutes is not None and time.monotonic() - began >= 60 * minutes:
            break
        try:
            carry_out(piece, out, progress, functools.partial(_heard, {e.engine for e in piece.values()}, notice))
        except Diverged as error:
            failures.append(str(error))
        finally:
            left -= collect(piece, out, records)
    return left, failures


def _heard(asked: set[str], notice: Notice | None, sentence: str) -> None:
    """Pass a notice on; where a fast engine was asked for and cannot be had, hours of the plain one would help nobody."""
    if sentence.startswith("engine plain") and not asked & {"auto", "plain"}:
        raise UsageError(f"{sentence.removeprefix('engine plain: ')}; give --engine auto to go on with what there is")
    if notice:
        notice(sentence)


def collect(plan: Plan, out: Path, records: Path | None) -> int:
    """Record the finished runs of a plan; returns how many there are."""
    folders = [RunFolder(out / name) for name in plan if (out / name / "config.toml").is_file()]
    finished = [folder for folder in folders if folder.finished]
    if records is not None:
        for folder in finished:
            keep(folder, records)
    return len(finished)


def missing(plan: Plan, records: Records) -> Plan:
    return {name: e for name, e in plan.items() if e.id not in records}


@dataclass(frozen=True)
class Again:
    """A recorded run made once more."""

    name: str
    before: list[float]  # test accuracies, as recorded
    now: list[float]


def compare_with_records(plan: Plan, out: Path, records: Records) -> list[Again]:
    """Every run that is both recorded and made again."""
    found = []
    for name, e in plan.items():
        if (before := records.get(e.id)) is not None and (out / name / "final.safetensors").exists():
            rows = [[row["test_accuracy"] for row in rows] for rows in (before.rows, RunFolder(out / name).rows())]
            old, new = ([float(short("test_accuracy", a)) for a in curve if a is not None] for curve in rows)
            found.append(Again(name, old, new))
    return found
