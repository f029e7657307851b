"""Run what is missing of the paper's experiments, piece by piece, and keep a record of every run that is finished."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import algorithms, availability, runner
from ..config import Experiment, device_kind, from_dict
from ..engine import horizon
from ..engine.checks import pick_device
from ..errors import Diverged, Paused, UsageError, nearest, number
from ..metrics.history import History, Row, read
from ..metrics.store import RunFolder
from ..registry import parse
from ..sweep import carry_out
from ..sweep.fuse import Notice, Plan
from .records import COLUMNS, Records, keep, made_with, prepare, short
from .study import Study

# Lanes fixed, so that a run's bits do not depend on which other runs it shares the GPU with.
GPU_ENGINES = {"fmnist": "batched:160:compiled", "cifar10": "streams:15:compiled"}
A_CLIENT_ROUND = {"lenet": 625 * 5.5e-6, "vgg11": 265 * 233e-6}  # seconds on an H200: so many steps, so long each
A_PIECE = 560.0  # seconds there, at most


@dataclass(frozen=True)
class Cell:
    """One algorithm in one column of a study."""

    study: Study
    column: str
    algorithm: str

    def runs(self, seeds: Sequence[int], scale: float = 1.0) -> list[Experiment]:
        return [self.study.experiment(self.column, self.algorithm, seed, scale) for seed in seeds]

    def found(self, records: Records, seeds: Sequence[int], scale: float = 1.0) -> list[History]:
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
    """Every run once, however many cells show it, under its own name."""
    runs = [e for cell in wanted for e in cell.runs(seeds, scale)]
    if not runs:
        raise UsageError("nothing is asked for: no column, algorithm or seed is left")
    return {e.name: placed(e, settings) for e in runs}


def placed(experiment: Experiment, settings: dict[str, Any]) -> Experiment:
    """The same run on the device asked for."""
    device = pick_device(str(settings.get("device", experiment.device)))
    fixed = GPU_ENGINES.get(parse(experiment.dataset)[0]) if device.type == "cuda" else None
    return dataclasses.replace(experiment, **({"engine": fixed} if fixed else {}) | settings | {"device": str(device)})


def pieces(plan: Plan) -> list[Plan]:
    """What runs together, ten minutes on an H200 if one run is not longer: small models side by side, of a large one those of a seed."""
    found: dict[Any, Plan] = {}
    for name, e in plan.items():
        own = () if e.model != "vgg11" else (e.availability, e.partition, e.seed)
        found.setdefault((e.dataset, own), {})[name] = e
    return [piece for group in found.values() for piece in _cut(group)]


def _cut(group: Plan) -> Iterator[Plan]:
    """Pieces of at most so much work; a run that is more than that alone is a piece of its own."""
    piece: Plan = {}
    work = 0.0
    for name, e in group.items():
        own = seconds(e)
        if piece and work + own > A_PIECE:
            yield piece
            piece, work = {}, 0.0
        piece, work = piece | {name: e}, work + own
    yield piece


def seconds(e: Experiment) -> float:
    """What a run takes on an H200 that is filled by its company."""
    return client_rounds(e) * A_CLIENT_ROUND.get(e.model, A_CLIENT_ROUND["lenet"])


def client_rounds(e: Experiment) -> int:
    """How often a client trains in this run, all rounds together."""
    cost = getattr(algorithms.make(e.algorithm), "uploads", 1)
    return int(horizon.plan(availability.make(e.availability), int(e.num_clients or 0), e.seed, None, e.rounds, e.uploads, cost).sum())


def reproduce(
    plan: Plan,
    out: Path,
    records: Path | None,
    minutes: float | None = None,
    progress: runner.Reporter | None = None,
    notice: Notice | None = None,
) -> tuple[int, list[str]]:
    """Carry the plan out and record what is finished, also when stopped in between.

    Returns how many runs are left, and a sentence for each piece in which runs diverged. After `minutes` what is running is saved.
    Without `records` nothing is recorded (scaled runs are not the paper's).
    """
    if minutes is not None:
        number("--minutes", minutes, low=0)
    if records is not None:
        prepare(records)
    for e in {e.dataset: e for e in plan.values()}.values():
        runner.settle(e)  # a dataset that is missing is better found out now than in an hour
    deadline, failures, left = None if minutes is None else time.monotonic() + 60 * minutes, [], len(plan)
    for piece in pieces(plan):
        try:
            if deadline is None or time.monotonic() < deadline:
                carry_out(piece, out, progress, functools.partial(_heard, {e.engine for e in piece.values()}, notice), deadline)
        except Diverged as error:
            failures.append(str(error))
        except Paused:
            pass
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
    found = 0
    for name, e in plan.items():
        with contextlib.suppress(UsageError):  # who asked for the runs was told; the others are recorded all the same
            folder = RunFolder(out / name)
            if folder.finished and from_dict(folder.config).id == e.id:
                if records is not None:
                    keep(folder, records)
                found += 1
    return found


def missing(plan: Plan, records: Records) -> Plan:
    return {name: e for name, e in plan.items() if e.id not in records}


def as_recorded(plan: Plan, records: Records) -> Plan:
    """The recorded runs of a plan, each on the engine it was made with where the device is of the same kind: equal to the bit there."""
    found = {}
    for name, e in plan.items():
        if (before := records.get(e.id)) is not None:
            same = device_kind(str(before.config["device"])) == device_kind(e.device)
            found[name] = dataclasses.replace(e, engine=before.environment.get("engine") or e.engine) if same else e
    return found


@dataclass(frozen=True)
class Again:
    """A recorded run made once more."""

    name: str
    before: list[Row]  # as recorded
    now: list[Row]
    otherwise: str  # what it was made with then and now, where that differs

    @property
    def same(self) -> bool:
        return self.before == self.now

    @property
    def ends(self) -> tuple[float, float]:
        """The final accuracies."""
        return float(self.before[-1]["test_accuracy"]), float(self.now[-1]["test_accuracy"])


def compare_with_records(plan: Plan, out: Path, records: Records) -> list[Again]:
    """Every run that is both recorded and made again."""
    found = []
    for name, e in plan.items():
        if (before := records.get(e.id)) is not None and (out / name / "final.safetensors").exists():
            folder = RunFolder(out / name)
            if from_dict(folder.config).id != e.id:
                raise UsageError(f"{folder.path} holds another run: give --again a folder of its own")
            old, new = ([{c: short(c, row.get(c)) for c in COLUMNS} for row in rows] for rows in (before.rows, read(folder).rows))
            final = folder.load("final")
            assert final is not None
            now = made_with(folder, final[1]) | {"device": device_kind(e.device)}
            found.append(Again(name, old, new, _otherwise(before.environment | {"device": device_kind(str(before.config["device"]))}, now)))
    return found


def _otherwise(then: dict[str, Any], now: dict[str, Any]) -> str:
    """What may have changed a run's bits between two environments."""
    kinds = [kind for kind in ("mimicfl", "torch", "device", "engine", "gpu", "processor") if then.get(kind) != now.get(kind)]
    return ", ".join(f"{kind} was {then.get(kind) or 'none'} and is {now.get(kind) or 'none'}" for kind in kinds)
