"""What a run leaves on disk and finds there again: rows, checkpoints, the result; and whose they are."""

import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..algorithms.base import pack, unpack
from ..errors import UsageError, whole
from ..fingerprint import OPTIONAL, Fingerprint
from ..metrics.history import Row
from ..metrics.store import RunFolder, check_same, differing_setting
from .fingerprint import fingerprint

if TYPE_CHECKING:
    from .run import Run

Saved = tuple[dict[str, Tensor], dict[str, str]]  # tensors and metadata
CHECKPOINT_SHARE = 0.05  # of the time may go into checkpoints when no interval is given


class Keeper:
    """Keeps one run in one folder."""

    def __init__(self, run: "Run", path: str | Path, config: dict[str, Any], every: int | None) -> None:
        self.run, self.config, self.every = run, config, every and whole("checkpoint_every", every)
        self.company = 1  # runs that share the time with this one
        self.saved_at, self.saving_took = time.perf_counter(), 0.0
        if names := run.fingerprint.unreadable:
            warnings.warn(
                f"the source of {', '.join(names)} cannot be read; the run folder identifies it by its bytecode, "
                "which changes with the version of Python",
                stacklevel=2,
            )
        self.folder = RunFolder.claim(path, config)
        try:
            self._restore()
        except BaseException:
            self.folder.close()
            raise

    def _restore(self) -> None:
        run, folder = self.run, self.folder
        saved = check_folder(folder, run, self.config)
        if saved is None:
            folder.begin(self.config)
            self.checkpoint()  # so that there is a good one from the first moment
            return
        tensors, facts = saved
        run.rows = folder.rows_of(facts)
        run.engine, run.threads = facts.get("engine", "plain"), int(facts.get("threads", 0))
        if run.planned > int(facts["rounds"]):
            self._check_longer()
        run.end_where_stopped()
        if folder.finished:
            if run.t == run.rounds:
                return
            tensors, facts = self._go_on()
        unpack(run.state, tensors, folder.path)
        run.buffers = {name: tensors[f"buffer.{name}"].to(run.device) for name in run.buffers}
        if run.watch:
            run.watch.population.passes = int(facts.get("passes", 0))
            run.watch.kept = {k.removeprefix("watch."): v.to(run.device) for k, v in tensors.items() if k.startswith("watch.")}
        run.recount()
        folder.settle(self.config)  # all is well: only now is anything changed
        folder.keep_rows(run.rows)

    def _check_longer(self) -> None:
        run, where = self.run, self.folder.path
        if run.rows and run.rows[-1].get("stopped"):
            raise UsageError(f"{where} was ended by its each_round after {run.t} rounds: choose another folder for a longer run")
        if run.watch:
            raise UsageError(
                f"{where} cannot become longer with diagnose, since what later rounds need was not kept: choose another folder"
            )

    def _go_on(self) -> Saved:
        """A finished run is to be longer: its last checkpoint, at its last round."""
        saved = self.folder.load("checkpoint")
        if saved is None or saved[1].get("round") != str(self.run.t):
            raise UsageError(
                f"{self.folder.path} is finished after {self.run.t} rounds and has no checkpoint to go on from: choose another folder"
            )
        return saved

    def append(self, row: Row) -> None:
        """Record a round, and save when it is time."""
        self.folder.append(row)
        run = self.run
        if self.every:
            due = run.t % self.every == 0
        else:
            due = time.perf_counter() - self.saved_at >= self.saving_took * self.company / CHECKPOINT_SHARE
        if due or run.t == run.rounds:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Save the state as it is after the last recorded round."""
        start = time.perf_counter()
        run = self.run
        tensors = pack(run.state) | {f"buffer.{name}": value for name, value in run.buffers.items()}
        tensors |= {f"watch.{name}": value for name, value in (run.watch.kept if run.watch else {}).items()}
        self.folder.save("checkpoint", tensors, **self._facts())
        self.saved_at = time.perf_counter()
        self.saving_took = self.saved_at - start

    def finish(self, by_client: list[float]) -> None:
        """Write the result, last of all."""
        run = self.run
        tensors = {"params": run.state.w} | {f"buffer.{name}": value for name, value in run.buffers.items()}
        if by_client:
            tensors["client_accuracy"] = torch.tensor(by_client, dtype=torch.float64)
        if run.class_counts is not None:
            tensors["class_counts"] = torch.from_numpy(run.class_counts)
        self.folder.save("final", tensors, **self._facts())

    def _facts(self) -> dict[str, str]:
        run = self.run
        how = {"engine": run.engine, "threads": str(run.threads)} | ({"passes": str(run.watch.population.passes)} if run.watch else {})
        return {"round": str(run.t), "run": run.fingerprint.to_json(), "rounds": str(run.planned), **how}

    def last_good(self) -> str:
        """Where a run that failed can be taken up."""
        saved = self.folder.load("checkpoint")
        return f"; the last good checkpoint, of round {int(saved[1]['round'])}, is kept in {self.folder.path}" if saved else ""


def check_folder(folder: RunFolder, run: "Run", config: dict[str, Any]) -> Saved | None:
    """This run's result or last checkpoint in the folder, None before the first round. A folder of a different run is refused."""
    name = "final" if folder.finished else "checkpoint"
    saved = folder.load(name)
    if saved is None or (saved[1].get("round") == "0" and not folder.rows(saved[1])):  # a call that failed at once may be corrected
        check_same(folder, config, longer=True)
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
        difference = _difference(folder, config, parts, longer=rounds < run.planned)
        raise UsageError(f"{folder.path} holds a different run ({difference}); {_remedy(parts)}")
    return saved


def _difference(folder: RunFolder, config: dict[str, Any], parts: list[str], longer: bool) -> str:
    """The first setting that differs; if all settings agree, the parts whose code or values differ."""
    setting = differing_setting(folder, config, longer)
    if setting and not set(parts) <= set(OPTIONAL):
        return setting
    verb = "differs" if len(parts) == 1 else "differ"
    changed = "" if "source" in config or set(parts) <= set(OPTIONAL) else ": its code or files have changed"
    return f"the {' and the '.join(parts)} {verb}{changed}"


def _remedy(parts: list[str]) -> str:
    again = "choose another folder, or delete this one to train again"
    if parts == ["callback"]:
        return f"pass the callback it was started with, or {again}"
    return f"resume it on the device it was started on, or {again}" if parts == ["device"] else again
