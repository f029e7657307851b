"""Checkpoints of a federation: each holds only the rows of the clients that changed, and the last few are kept.

    checkpoint.safetensors          the model, other small state, and the list of segments that hold the clients' rows
    state/rows-ROUND.safetensors    a segment: the rows of the clients that changed since the segment before
    history/ROUND.safetensors       earlier checkpoints, as hard links; `rollback` returns to one of them

A segment is written before the checkpoint that lists it, and removed when no checkpoint lists it, so a process killed at any moment
leaves a complete checkpoint. When the segments hold more than twice the rows that are in use, they are merged into one.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UsageError
from ..files import explained, make_folder, replacing, write_tensors
from ..metrics.recorder import Saved
from ..metrics.store import RunFolder, checksum

VERSION = "2"  # of this layout. Version 0.2 of the package wrote one file with all rows, and no version
CLIENTS, ROWS = ".clients", ".rows"


class CheckpointStore:
    """The checkpoints in one run folder."""

    def __init__(self, folder: RunFolder, keep: int = 5) -> None:
        self.folder, self.keep = folder, keep
        self.state, self.history = folder.path / "state", folder.path / "history"
        self.segments: list[dict[str, Any]] = []  # file, crc and number of rows, oldest first

    def save(self, tensors: dict[str, Tensor], facts: Mapping[str, str], changed: Mapping[str, set[int]]) -> None:
        """Write a checkpoint. `changed` names the clients of each memory whose rows differ from those of the last one."""
        names = [name.removesuffix(CLIENTS) for name in tensors if name.endswith(CLIENTS)]
        alive = sum(len(tensors[name + CLIENTS]) for name in names)
        whole = not self.segments or sum(each["rows"] for each in self.segments) + sum(map(len, changed.values())) > 2 * alive + 16
        parts: dict[str, Tensor] = {}
        for name in names:
            clients, rows = tensors[name + CLIENTS], tensors[name + ROWS]
            if not whole:
                slots = torch.isin(clients, torch.tensor(sorted(changed.get(name, ())), dtype=clients.dtype)).nonzero()[:, 0]
                clients, rows = clients[slots], rows[slots]
            parts |= {name + CLIENTS: clients, name + ROWS: rows}
        if any(len(part) for part in parts.values()):
            self.segments = ([] if whole else self.segments) + [self._write_segment(parts, facts["round"])]
        small = {key: value[:0] if key in parts else value for key, value in tensors.items()}  # without rows, of which the shape is kept
        self.folder.save("checkpoint", small, **facts, store=VERSION, segments=json.dumps(self.segments), memories=json.dumps(names))
        self._keep_history(int(facts["round"]))
        self._sweep()

    def _write_segment(self, parts: dict[str, Tensor], round_: str) -> dict[str, Any]:
        make_folder(self.state)
        names = {each["file"] for each in self.segments}
        file = next(name for k in range(len(names) + 2) if (name := f"rows-{round_}{'-' * bool(k)}{k or ''}.safetensors") not in names)
        write_tensors(self.state / file, parts, crc := {"crc32": checksum(parts)})
        return {"file": file, "crc": crc["crc32"], "rows": sum(len(part) for key, part in parts.items() if key.endswith(CLIENTS))}

    def _keep_history(self, round_: int) -> None:
        """Keep the checkpoint that was just written beside the last few."""
        with explained(make_folder(self.history)):
            target = self.history / f"{round_}.safetensors"
            target.unlink(missing_ok=True)
            try:
                os.link(self.folder.path / "checkpoint.safetensors", target)
            except OSError:  # the file system has no hard links
                with replacing(target) as partial:
                    shutil.copyfile(self.folder.path / "checkpoint.safetensors", partial)
            for old in self.rounds()[: -self.keep]:
                (self.history / f"{old}.safetensors").unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove segments that no checkpoint lists."""
        listed = {each["file"] for each in self.segments}
        for round_ in self.rounds():
            listed |= {each["file"] for each in json.loads(self._facts(round_).get("segments", "[]"))}
        for file in self.state.glob("*.safetensors") if self.state.is_dir() else []:
            if file.name not in listed:
                file.unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """After how many rounds the kept checkpoints were written, in order."""
        return sorted(int(file.stem) for file in self.history.glob("*.safetensors") if file.stem.isdecimal())

    def _facts(self, round_: int) -> dict[str, str]:
        try:
            with safe_open(self.history / f"{round_}.safetensors", framework="pt") as opened:
                return dict(opened.metadata() or {})
        except (SafetensorError, OSError):
            return {}

    def load(self, name: str = "checkpoint") -> Saved | None:
        """The last checkpoint, or another one, with all rows, in the form in which it was saved; None if there is none."""
        saved = self.folder.load(name)
        if saved is None:
            return None
        tensors, facts = saved
        if facts.get("store", VERSION) != VERSION:
            raise UsageError(f"{self.folder.path} was written by a newer version of mimicfl (format {facts['store']}); upgrade mimicfl")
        if "store" in facts:
            self.segments = json.loads(facts["segments"])
            tensors = tensors | self._rows(json.loads(facts["memories"]))
        return tensors, facts

    def _rows(self, names: list[str]) -> dict[str, Tensor]:
        """The clients' rows, each from the last segment that has it."""
        parts = [self._read_segment(each) for each in self.segments]
        found: dict[str, Tensor] = {}
        for name in names:
            places = {int(c): (part, k) for part in parts if name + CLIENTS in part for k, c in enumerate(part[name + CLIENTS].tolist())}
            if places:
                found[name + CLIENTS] = torch.tensor(list(places), dtype=torch.int64)
                found[name + ROWS] = torch.stack([part[name + ROWS][k] for part, k in places.values()])
        return found

    def _read_segment(self, segment: dict[str, Any]) -> dict[str, Tensor]:
        file = self.state / segment["file"]
        try:
            with safe_open(file, framework="pt") as opened:
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UsageError(
                f"{file} is damaged or missing ({error}); return to an earlier checkpoint with `mimicfl flower rollback`"
            ) from None
        if checksum(tensors) != segment["crc"]:
            raise UsageError(f"{file} is damaged (its checksum is wrong); return to an earlier checkpoint with `mimicfl flower rollback`")
        return tensors


def rollback(path: str | Path, to: int | None = None) -> int:
    """Return a federation to an earlier checkpoint: after `to` rounds, or the one before the last. Returns the number of rounds kept."""
    RunFolder(path)  # refuses what is not a run folder
    folder = RunFolder.claim(path, {})
    try:
        kept = CheckpointStore(folder)
        rounds = kept.rounds()
        if folder.config.get("source") != "flower":
            raise UsageError(f"{folder.path} is not a federation: only runs on Flower can be rolled back")
        if to is None:
            to = rounds[-2] if len(rounds) > 1 else -1
        if to not in rounds:
            listed = ", ".join(map(str, rounds)) or "none"
            raise UsageError(f"{folder.path} has no checkpoint to return to; checkpoints after these numbers of rounds are kept: {listed}")
        saved = kept.load(f"history/{to}")  # with its rows: a damaged checkpoint is refused before anything is replaced
        assert saved is not None
        rows = folder.rows_of(saved[1])
        with replacing(folder.path / "checkpoint.safetensors") as partial:
            shutil.copyfile(kept.history / f"{to}.safetensors", partial)
        folder.reopen()
        folder.keep_rows(rows)
        for later in rounds:
            if later > to:
                (kept.history / f"{later}.safetensors").unlink()
    finally:
        folder.close()
    return to
