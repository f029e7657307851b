"""What a run leaves on disk and finds there again: rows, checkpoints, the result; and the number that says whose they are."""

import json
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import algorithms
from ..algorithms.base import pack, unpack
from ..config import CAME_LATER
from ..errors import UsageError, whole
from ..metrics.history import Row
from ..metrics.store import RunFolder
from ..registry import describe

if TYPE_CHECKING:
    from .run import Run

CHECKPOINT_SHARE = 0.05  # of the time may go into checkpoints when no interval is given


class Keeper:
    """Keeps one run in one folder."""

    def __init__(self, run: "Run", path: str | Path, config: dict[str, Any], every: int | None) -> None:
        self.run, self.every = run, every and whole("checkpoint_every", every)
        self.company = 1  # runs that share the time with this one
        self.saved_at, self.saving_took = time.perf_counter(), 0.0
        self.folder = RunFolder.claim(path, config)
        try:
            self._restore()
        except BaseException:
            self.folder.close()
            raise

    def _restore(self) -> None:
        run, folder = self.run, self.folder
        name = "final" if folder.finished else "checkpoint"
        saved = folder.load(name)
        if saved is None:
            self.checkpoint()  # so that there is a good one from the first moment
            folder.keep_rows([])
            return
        tensors, facts = saved
        check_owner(folder, name, facts, run)
        run.rows = folder.rows_of(facts)
        run.engine = facts.get("engine", "plain")
        if name == "final":
            return
        folder.keep_rows(run.rows)
        unpack(run.state, tensors, folder.path)
        run.buffers = {name: tensors[f"buffer.{name}"].to(run.device) for name in run.buffers}
        if run.watch:
            run.watch.kept = {k.removeprefix("watch."): v.to(run.device) for k, v in tensors.items() if k.startswith("watch.")}
        run.recount()

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
        return {"round": str(self.run.t), "run": fingerprint(self.run), "engine": self.run.engine}

    def last_good(self) -> str:
        """Where a run that failed can be taken up."""
        saved = self.folder.load("checkpoint")
        return f"; the last good checkpoint, of round {int(saved[1]['round'])}, is kept in {self.folder.path}" if saved else ""


def check_owner(folder: RunFolder, name: str, facts: dict[str, str], run: "Run") -> None:
    """Refuse what was left by a run that began otherwise, be it by an earlier version of the same settings."""
    if facts.get("run") != fingerprint(run):
        raise UsageError(
            f"the {name} in {folder.path} is of another run (other data, split, model, loss or settings): choose another folder"
        )


def fingerprint(run: "Run") -> str:
    """A number for everything the result depends on, code aside."""
    if run.number:
        return run.number
    crc = run.data.checksum()
    weights = [tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy() for tensor in run.template.state_dict().values()]
    for array in [*run.split, run.available, run.share.cpu().numpy(), *weights]:
        crc = zlib.crc32(np.ascontiguousarray(array).data.cast("B"), crc)
    busy = [(t, m) for t, m in enumerate(run.available.sum(axis=1).tolist()) if m]
    own = getattr(run.algorithm, "__dict__", {}).items()
    words = [
        describe(algorithms.ALGORITHMS, run.algorithm),
        sorted((key, repr(value)) for key, value in own if isinstance(value, (int, float, str))),
        *[getattr(run.loss, "__qualname__", type(run.loss).__name__), str(run.template), run.device.type],
        *[run.local.epochs, run.local.steps, run.local.batch_size, run.update, run.seed, run.eval_every],
        *[run.data.facts(), run.precision],
        *[(key, value) for key in CAME_LATER if (value := getattr(run.local, key))],
        [[rate(t, m) for rate in (run.local_lr, run.global_lr)] for t, m in busy],
    ]
    run.number = f"{zlib.crc32(json.dumps(words).encode(), crc):08x}"
    return run.number
