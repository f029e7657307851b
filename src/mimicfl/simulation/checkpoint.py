"""Checkpoints of a run in its folder: when to save, what to save, and how to resume."""

import json
import math
import time
import warnings
from typing import Any

import torch
from torch import Tensor

from ..algorithms.base import shown_as
from ..errors import UsageError
from ..files import is_scratch
from ..fingerprint import OPTIONAL, Fingerprint
from ..metrics.recorder import Saved
from ..metrics.store import RunFolder, check_same, differing_setting
from ..registry import parse
from .fingerprint import fingerprint
from .parts import RunParts

CHECKPOINT_SHARE = 0.05  # of the time may go into checkpoints when no interval is given
SCRATCH_SHARE = 0.02  # the same for runs that are only kept until their results have been read


class Checkpoints:
    """The checkpoints of one run. `every`: rounds between two of them; 0: as often as 5 % of the time allows."""

    def __init__(self, run: RunParts, folder: RunFolder, every: int) -> None:
        self.run, self.folder, self.every = run, folder, every
        self.saved_at, self.saving_took = time.perf_counter(), 0.0
        if names := run.fingerprint.unreadable:
            warnings.warn(
                f"the source of {', '.join(names)} cannot be read; the run folder identifies it by its bytecode, "
                "which changes with the version of Python",
                stacklevel=2,
            )

    def restore(self) -> None:
        """Resume from the folder, or start in it."""
        run, folder = self.run, self.folder
        saved = check_folder(folder, run)
        if saved is None:
            folder.begin(run.config)
            self.save()  # so that there is a valid checkpoint from the start
            return
        tensors, facts = saved
        run.recorder.restore(folder.rows_of(facts))
        run.engine, run.threads = facts.get("engine", "plain"), int(facts.get("threads", 0))
        if run.planned > int(facts["rounds"]):
            self._check_extension()
        run.end_where_stopped()
        if folder.finished:
            if run.t == run.rounds:
                return
            tensors, facts = self._last_checkpoint()
        run.server.restore(tensors, folder.path)
        if run.versions is not None:
            run.versions.restore(tensors, run.problem.device)
        if run.diagnostics:
            run.diagnostics.population.passes = int(facts.get("passes", 0))
            kept = {k.removeprefix("diagnostics."): v for k, v in tensors.items() if k.startswith("diagnostics.")}
            run.diagnostics.kept = {name: value.to(run.problem.device) for name, value in kept.items()}
        folder.extend(run.config)  # all checks have passed: only now is anything changed
        folder.keep_rows(run.recorder.rows)

    def _check_extension(self) -> None:
        run, where = self.run, self.folder.path
        if run.recorder.stopped:
            raise UsageError(f"{where} was stopped by its callback after {run.t} rounds and cannot be extended: choose another folder")
        if run.diagnostics:
            raise UsageError(
                f"{where} was diagnosed and cannot be extended: the state that later rounds need was not saved; choose another folder"
            )

    def _last_checkpoint(self) -> Saved:
        """The state after the last round of a finished run that is to be extended."""
        saved = self.folder.load("checkpoint")
        if saved is None or saved[1].get("round") != str(self.run.t):
            where = f"{self.folder.path} is finished after {self.run.t} rounds"
            raise UsageError(f"{where} and has no checkpoint to resume from: choose another folder")
        return saved

    def save_if_due(self, num_runs: int) -> None:
        """Save if it is time; `num_runs` share the time, and each of them saves checkpoints."""
        run = self.run
        if run.t == run.rounds:
            due = not is_scratch()  # the result follows at once; this checkpoint is for extending the run
        elif self.every:
            due = run.t % self.every == 0
        else:
            share = SCRATCH_SHARE if is_scratch() else CHECKPOINT_SHARE
            due = time.perf_counter() - self.saved_at >= self.saving_took * num_runs / share
        if due:
            self.save()

    def save(self) -> None:
        """Save the state as it is after the last recorded round."""
        start, run = time.perf_counter(), self.run
        tensors = run.server.tensors()
        tensors |= run.versions.tensors() if run.versions is not None else {}
        tensors |= {f"diagnostics.{name}": value for name, value in (run.diagnostics.kept if run.diagnostics else {}).items()}
        run.recorder.save("checkpoint", tensors, self._facts())
        self.saved_at = time.perf_counter()
        self.saving_took = self.saved_at - start

    def finish(self, client_accuracy: list[float | None], client_scores: list[float | None]) -> None:
        """Write the result: the model, and per client its accuracy and score."""
        run = self.run
        tensors: dict[str, Tensor] = {}
        for name, values in (("client_accuracy", client_accuracy), ("client_scores", client_scores)):
            if values:
                tensors[name] = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
        if run.problem.class_counts is not None:
            tensors["class_counts"] = torch.from_numpy(run.problem.class_counts)
        run.recorder.finish(run.server.model, self._facts(), tensors)

    def _facts(self) -> dict[str, str]:
        run = self.run
        more = {"passes": str(run.diagnostics.population.passes)} if run.diagnostics else {}
        if directions := run.problem.directions:
            more["directions"] = json.dumps(directions)
        if shown := shown_as(parse(str(run.config.get("algorithm", "")))[0]):
            more["shown as"] = json.dumps(shown)  # a report does not import the plugin
        return {"run": run.fingerprint.to_json(), "rounds": str(run.planned), "engine": run.engine, "threads": str(run.threads), **more}

    def last_good(self) -> str:
        """Where a run that failed can be resumed."""
        saved = self.folder.load("checkpoint")
        return f"; the last good checkpoint, of round {int(saved[1]['round'])}, is kept in {self.folder.path}" if saved else ""


def check_folder(folder: RunFolder, run: RunParts) -> Saved | None:
    """This run's result or last checkpoint in the folder, None before the first round. A folder of a different run is refused."""
    name = "final" if folder.finished else "checkpoint"
    saved = folder.load(name)
    if saved is None or (saved[1].get("round") == "0" and not folder.rows(saved[1])):  # a call that failed at once may be corrected
        check_same(folder, run.config)
        return None
    facts = saved[1]
    there = Fingerprint.from_json(facts.get("run", ""))
    rounds = int(facts["rounds"]) if facts.get("rounds", "").isdecimal() else 0
    if not there.run or not rounds:
        raise UsageError(f"{folder.path} was written by an earlier version of mimicfl and cannot be continued; choose another folder")
    here = run.fingerprint if rounds >= run.planned else fingerprint(run, rounds)  # a run may be extended
    rows = folder.rows_of(facts)
    complete = run.planned <= rounds and bool(rows) and (len(rows) == rounds or rows[-1].get("stopped", False))
    if parts := here.differences(there, complete):
        difference = _difference(folder, run.config, parts, longer=rounds < run.planned)
        raise UsageError(f"{folder.path} holds a different run ({difference}); {_remedy(parts)}")
    return saved


def _difference(folder: RunFolder, config: dict[str, Any], parts: list[str], longer: bool) -> str:
    """The first setting that differs; if all settings agree, the parts whose code or values differ."""
    setting = differing_setting(folder, config, longer)
    if setting and not set(parts) <= set(OPTIONAL):
        return setting
    verb = "differs" if len(parts) == 1 and not parts[0].endswith(("weights", "rates")) else "differ"
    changed = "" if "source" in config or set(parts) <= set(OPTIONAL) else ": its code or files have changed"
    return f"the {' and the '.join(parts)} {verb}{changed}"


def _remedy(parts: list[str]) -> str:
    again = "choose another folder, or delete this one to train again"
    if parts == ["callback"]:
        return f"pass the callback it was started with, or {again}"
    return f"resume it on the device it was started on, or {again}" if parts == ["device"] else again
