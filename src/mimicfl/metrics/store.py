"""One run = one folder, safe against SIGKILL at any moment.

    config.toml              the settings, written first, under a lock
    env.json                 versions and hardware
    rows.jsonl               one line a round, appended
    checkpoint.safetensors   model, algorithm state and round; replaced in one step, after the rows it counts are on disk
    final.safetensors        written last: its presence means that the run is finished

Rows beyond the checkpoint, or half a line of them, are what a killed run leaves; reading ignores the half line and
resuming trains those rounds again.
"""

import contextlib
import json
import math
import os
import tomllib
import weakref
import zlib
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..config import BESIDE_THE_POINT, defaults
from ..errors import UsageError
from ..files import explained, sweep, write_tensors, write_text
from ..toml import dumps
from .environment import continued, environment

try:
    import fcntl
except ImportError:  # not on Windows: two processes in one folder are then the user's care
    fcntl = None  # type: ignore[assignment]

FORMAT = "mimicfl-1"
LENGTHS = ("rounds", "uploads")  # settings that say how long a run is
FILES = ("config.toml", "env.json", "rows.jsonl", "checkpoint.safetensors", "final.safetensors")
_REMEDY = "delete it, and the run is made good from what is left"
Row = dict[str, Any]


class RunFolder:
    """A run on disk: open an existing one with `RunFolder(path)`, begin or continue one with `RunFolder.claim(path, config)`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "config.toml").is_file():
            raise UsageError(f"{self.path} is not a run folder: it has no config.toml")
        try:
            self.config: dict[str, Any] = tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise UsageError(f"{self.path / 'config.toml'} cannot be read: {error}") from None
        self._rows: TextIO | None = None
        self._lock: TextIO | None = None

    @classmethod
    def claim(cls, path: str | Path, config: dict[str, Any]) -> "RunFolder":
        """The folder for this run: new, or the same run's from before; another run's is refused and left alone."""
        path = Path(path)
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
            others = sorted(p.name for p in path.iterdir() if not p.name.startswith(".") and p.name not in FILES)
        if others and not (path / "config.toml").exists():
            raise UsageError(f"{path} is not empty and not a run folder (it holds {others[0]}): choose another folder")
        lock = _lock(path)
        try:
            if (path / "config.toml").exists():
                check_same(cls(path), config, longer=True)
            else:
                write_text(path / "config.toml", dumps(config))
            folder = cls(path)
            if not folder.finished:
                known, here = folder.environment(), environment()
                write_text(path / "env.json", json.dumps(continued(known, here) if known else here, indent=2) + "\n")
            sweep(path, FILES)
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        folder._lock = lock
        return folder

    def settle(self, config: dict[str, Any]) -> None:
        """The run goes on with these settings, under which it may be longer than it was."""
        text = dumps(config)
        if any(self.config.get(key) != tomllib.loads(text).get(key) for key in LENGTHS):
            write_text(self.path / "config.toml", text)
        if self.finished:
            (self.path / "final.safetensors").unlink()

    def close(self) -> None:
        for handle in (self._rows, self._lock):
            if handle is not None:
                with contextlib.suppress(OSError):
                    handle.close()
        self._rows = self._lock = None

    @property
    def finished(self) -> bool:
        return (self.path / "final.safetensors").exists()

    def environment(self) -> dict[str, Any]:
        try:
            found = json.loads((self.path / "env.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def rows(self) -> list[Row]:
        """All whole rows; what follows the first torn line is dropped."""
        file = self.path / "rows.jsonl"
        rows: list[Row] = []
        if not file.is_file():
            return rows
        for line in file.read_bytes().split(b"\n")[:-1]:
            try:
                row = json.loads(line)
            except ValueError:
                break
            if not _is_row(row) or row["round"] != len(rows):
                break
            rows.append(row)
        return rows

    def rows_of(self, facts: dict[str, str]) -> list[Row]:
        """The rows that a checkpoint or result counts; if some are gone, say so."""
        count, rows = int(facts.get("round", 0)), self.rows()
        if len(rows) < count:
            raise UsageError(
                f"{self.path / 'rows.jsonl'} is damaged: it has {len(rows)} good rows, the run had reached round {count}; "
                "delete checkpoint.safetensors and final.safetensors to train it again from the start"
            )
        return rows[:count]

    def append(self, row: Row) -> None:
        with explained(self.path / "rows.jsonl"):
            if self._rows is None:
                self._rows = (self.path / "rows.jsonl").open("a", encoding="utf-8")
            self._rows.write(json.dumps(row, allow_nan=False) + "\n")
            self._rows.flush()

    def keep_rows(self, rows: list[Row]) -> None:
        """Cut the file back to these rows, in one step."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None
        write_text(self.path / "rows.jsonl", "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))

    def save(self, name: str, tensors: dict[str, Tensor], **facts: str) -> None:
        """Write `checkpoint` or `final` with a checksum, after the rows are safely on disk."""
        if self._rows is not None:
            with explained(self.path / "rows.jsonl"):
                os.fsync(self._rows.fileno())
        flat = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        write_tensors(self.path / f"{name}.safetensors", flat, {"format": FORMAT, "crc32": _checksum(flat), **facts})

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """The tensors and facts of `checkpoint` or `final`, or None if it was never written."""
        file = self.path / f"{name}.safetensors"
        if not file.exists():
            return None
        try:
            with safe_open(file, framework="pt") as opened:
                facts = dict(opened.metadata() or {})
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file} is damaged ({error}): {_REMEDY}") from None
        if facts.get("format") != FORMAT:
            raise UsageError(f"{file} was not written by this version of mimicfl (format {facts.get('format')!r})")
        if facts.get("crc32") != _checksum(tensors):
            raise UsageError(f"{file} is damaged (its checksum is wrong): {_REMEDY}")
        return tensors, facts


def _is_row(row: Any) -> bool:
    """Does it have what every reader of rows relies on?"""
    if not isinstance(row, dict) or not isinstance(row.get("clients"), list):
        return False
    counts = all(
        isinstance(row.get(key), int) for key in ("round", "active", "uploads", "vectors_up", "bytes_up", "vectors_down", "bytes_down")
    )
    values = [row.get(key) for key in ("test_accuracy", "test_loss", "train_loss", "distance")]
    finite = all(value is None or (isinstance(value, float) and math.isfinite(value)) for value in values)
    return counts and finite and all(isinstance(client, int) and client >= 0 for client in row["clients"])


def _checksum(tensors: dict[str, Tensor]) -> str:
    crc = 0
    for key in sorted(tensors):
        raw = tensors[key].reshape(-1).view(torch.uint8) if tensors[key].numel() else torch.empty(0, dtype=torch.uint8)
        crc = zlib.crc32(raw.numpy().data, zlib.crc32(key.encode(), crc))
    return f"{crc:08x}"


def _lock(path: Path) -> TextIO | None:
    """Hold the folder against a second writer; the lock goes with the process, however it ends."""
    if fcntl is None:
        return None
    with explained(path):
        handle = (path / ".lock").open("a")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            raise UsageError(f"{path} is being written by another process: wait for it or choose another folder") from None
        _LOCKS.add(handle)
        return handle


_LOCKS: weakref.WeakSet[TextIO] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # a forked child would hold the lock for as long as it lives, beyond its parent's death
    os.register_at_fork(after_in_child=lambda: [handle.close() for handle in list(_LOCKS)])


def check_same(folder: RunFolder, config: dict[str, Any], longer: bool = False) -> None:
    """Refuse a folder that holds another run; a setting that an older version did not know counts as its default. `longer` allows more
    rounds, or uploads, than it was begun with."""
    ours, theirs = defaults() | tomllib.loads(dumps(config)), defaults() | folder.config
    pairs = [(theirs.get(key), ours.get(key)) for key in LENGTHS]
    more = longer and all(a == b or (isinstance(a, int) and isinstance(b, int) and a < b) for a, b in pairs)
    for key in sorted((ours.keys() | theirs.keys()) - set(BESIDE_THE_POINT) - set(LENGTHS if more else ())):
        if ours.get(key) != theirs.get(key):
            difference = f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here"
            raise UsageError(f"{folder.path} holds another run ({difference}): choose another folder")


def find_runs(paths: list[str | Path]) -> list[RunFolder]:
    """The run folders at or below these paths, in order."""
    found: dict[Path, RunFolder] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise UsageError(f"{path} does not exist")
        below = [path] if (path / "config.toml").is_file() else sorted(p.parent for p in path.glob("**/config.toml"))
        if not below:
            raise UsageError(f"{path} holds no run: no config.toml in it or below it")
        for folder in below:
            found.setdefault(folder.resolve(), RunFolder(folder))
    return list(found.values())
