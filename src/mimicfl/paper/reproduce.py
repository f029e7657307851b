"""Run the missing experiments of the paper in batches, and record every finished run."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import algorithms, participation
from ..errors import Diverged, Paused, UsageError, nearest, number
from ..experiments.build import load_data
from ..experiments.execute import Notice, Plan, Progress, run_plan
from ..metrics.find import is_finished
from ..metrics.history import History, read
from ..metrics.rows import Row
from ..metrics.store import RunFolder
from ..participation.run_schedule import run_schedule
from ..problem import find_device
from ..registry import parse
from ..settings import Experiment, device_kind, from_dict
from .records import COLUMNS, Records, keep, prepare, short
from .study import Study

# Fixed lanes, so that the result of a run does not depend on the other runs on the GPU.
GPU_ENGINES = {"fmnist": "batched:160:compiled", "cifar10": "streams:15:compiled"}
SECONDS_PER_CLIENT_ROUND = {"lenet": 625 * 5.5e-6, "vgg11": 265 * 233e-6}  # on an H200: steps x seconds per step
MOST_SECONDS = 560.0  # of a batch of runs on an H200


@dataclass(frozen=True)
class Cell:
    """One algorithm in one column of a study."""

    study: Study
    column: str
    algorithm: str

    def runs(self, seeds: Sequence[int], scale: float = 1.0) -> list[Experiment]:
        """The experiments of this cell, one per seed."""
        return [self.study.experiment(self.column, self.algorithm, seed, scale) for seed in seeds]

    def found(self, records: Records, seeds: Sequence[int], scale: float = 1.0) -> list[History]:
        """The recorded runs of this cell."""
        return [run for e in self.runs(seeds, scale) if (run := records.get(e.id)) is not None]


def cells(studies: Sequence[Study], columns: Sequence[str] = (), rows: Sequence[str] = ()) -> Iterator[Cell]:
    """All cells of these studies, or those of the named columns and algorithms."""
    for name, known in (("column", [c for s in studies for c in s.columns]), ("algorithm", [a for s in studies for a in s.algorithms])):
        for word in columns if name == "column" else rows:
            if word not in known:
                raise UsageError(f"there is no {name} {word!r} in {', '.join(s.name for s in studies)}; {nearest(word, known)}")
    for study in studies:
        for column in study.columns:
            for algorithm in study.algorithms:
                if (not columns or column in columns) and (not rows or algorithm in rows):
                    yield Cell(study, column, algorithm)


def plan_of(wanted: Sequence[Cell], seeds: Sequence[int], scale: float, settings: dict[str, Any]) -> Plan:
    """The runs of these cells by name. A run that several cells share appears once."""
    runs = [e for cell in wanted for e in cell.runs(seeds, scale)]
    if not runs:
        raise UsageError("nothing to run: no column, algorithm or seed is selected; see mimicfl reproduce --list")
    return {e.name: placed(e, settings) for e in runs}


def placed(experiment: Experiment, settings: dict[str, Any]) -> Experiment:
    """The same run on the requested device, with fixed lanes on a GPU."""
    device = find_device(str(settings.get("device", experiment.device)))
    fixed = GPU_ENGINES.get(parse(experiment.dataset)[0]) if device.type == "cuda" else None
    return dataclasses.replace(experiment, **({"engine": fixed} if fixed else {}) | settings | {"device": str(device)})


def pieces(plan: Plan) -> list[Plan]:
    """Split a plan into batches of runs that are trained together, each at most about ten minutes on an H200.

    Runs of small models are batched freely; runs of a large model only with those of the same seed and setting.
    """
    found: dict[Any, Plan] = {}
    for name, e in plan.items():
        own = () if e.model != "vgg11" else (e.availability, e.partition, e.seed)
        found.setdefault((e.dataset, own), {})[name] = e
    return [piece for group in found.values() for piece in _cut(group)]


def _cut(group: Plan) -> Iterator[Plan]:
    """Split runs into batches of at most MOST_SECONDS; a longer run is a batch by itself."""
    piece: Plan = {}
    work = 0.0
    for name, e in group.items():
        own = seconds(e)
        if piece and work + own > MOST_SECONDS:
            yield piece
            piece, work = {}, 0.0
        piece, work = piece | {name: e}, work + own
    yield piece


def seconds(e: Experiment) -> float:
    """Estimated seconds of a run on an H200 that other runs keep fully occupied."""
    return client_rounds(e) * SECONDS_PER_CLIENT_ROUND.get(e.model, SECONDS_PER_CLIENT_ROUND["lenet"])


def client_rounds(e: Experiment) -> int:
    """The number of active clients, summed over all rounds of the run."""
    cost = algorithms.trait(algorithms.make(e.algorithm), "uploads")
    return int(run_schedule(participation.make(e.availability), int(e.num_clients or 0), e.seed, None, e.rounds, e.uploads, cost).sum())


def reproduce(
    plan: Plan,
    out: Path,
    records: Path | None,
    minutes: float | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> tuple[int, list[str]]:
    """Execute the plan and record the finished runs, even if it is interrupted.

    Returns the number of unfinished runs, and a message for each batch in which runs diverged. After `minutes` the active runs are saved
    and stopped. Without `records` nothing is recorded; scaled runs are not the paper's.
    """
    if minutes is not None:
        number("--minutes", minutes, low=0)
    if records is not None:
        prepare(records)
    for e in {e.dataset: e for e in plan.values()}.values():
        load_data(e)  # report a missing dataset now, before any training
    until, failures, left = None if minutes is None else time.monotonic() + 60 * minutes, [], len(plan)
    for piece in pieces(plan):
        try:
            if until is None or time.monotonic() < until:
                run_plan(piece, out, progress, functools.partial(_on_notice, {e.engine for e in piece.values()}, notice), until)
        except Diverged as error:
            failures.append(str(error))
        except Paused:
            pass
        finally:
            left -= collect(piece, out, records)
    return left, failures


def _on_notice(asked: set[str], notice: Notice | None, sentence: str) -> None:
    """Forward a notice, but fail if the requested fast engine is not available: the plain engine would take hours."""
    if sentence.startswith("engine plain") and not asked & {"auto", "plain"}:
        raise UsageError(f"{sentence.removeprefix('engine plain: ')}; give --engine auto to use an available engine")
    if notice:
        notice(sentence)


def collect(plan: Plan, out: Path, records: Path | None) -> int:
    """Record the finished runs of a plan and return their number."""
    found = 0
    for name, e in plan.items():
        with contextlib.suppress(UsageError):  # already reported by the training; record the other runs
            folder = RunFolder(out / name)
            if folder.finished and from_dict(folder.config).id == e.id:
                if records is not None:
                    keep(folder, records)
                found += 1
    return found


def missing(plan: Plan, records: Records) -> Plan:
    """The runs of a plan that have no record."""
    return {name: e for name, e in plan.items() if e.id not in records}


def as_recorded(plan: Plan, records: Records) -> Plan:
    """The recorded runs of a plan. On a device of the recorded kind each uses its recorded engine, so that it repeats bit for bit."""
    found = {}
    for name, e in plan.items():
        if (before := records.get(e.id)) is not None:
            same = device_kind(str(before.config["device"])) == device_kind(e.device)
            found[name] = dataclasses.replace(e, engine=before.environment.get("engine") or e.engine) if same else e
    return found


@dataclass(frozen=True)
class Again:
    """A recorded run that was repeated."""

    name: str
    before: list[Row]  # as recorded
    now: list[Row]
    otherwise: str  # differences between the two environments

    @property
    def same(self) -> bool:
        return self.before == self.now

    @property
    def ends(self) -> tuple[float, float]:
        """The final accuracies."""
        return float(self.before[-1]["test_accuracy"]), float(self.now[-1]["test_accuracy"])


def compare_with_records(plan: Plan, out: Path, records: Records) -> list[Again]:
    """Compare every repeated run with its record."""
    found = []
    for name, e in plan.items():
        if (before := records.get(e.id)) is not None and is_finished(out / name):
            folder = RunFolder(out / name)
            if from_dict(folder.config).id != e.id:
                raise UsageError(f"{folder.path} holds a different run; give --again a separate folder with --out")
            run = read(folder)
            old, new = ([{c: short(c, row.get(c)) for c in COLUMNS} for row in rows] for rows in (before.rows, run.rows))
            then = before.environment | {"device": device_kind(str(before.config["device"]))}
            now = run.environment | {"device": device_kind(e.device)}
            found.append(Again(name, old, new, _environment_changes(then, now)))
    return found


def _environment_changes(then: dict[str, Any], now: dict[str, Any]) -> str:
    """The differences between two environments that may change the bits of a run."""
    kinds = [kind for kind in ("mimicfl", "torch", "device", "engine", "gpu", "processor") if then.get(kind) != now.get(kind)]
    return ", ".join(f"{kind} was {then.get(kind) or 'none'} and is {now.get(kind) or 'none'}" for kind in kinds)
