"""One run = one folder, safe against SIGKILL at any moment.

    config.toml              the settings, written first, under a lock
    env.json                 versions and hardware
    rows.jsonl               one line per round, appended; each ends with a checksum of itself and all lines before it
    checkpoint.safetensors   model, algorithm state and round; replaced in one step, after the rows it counts are on disk
    final.safetensors        written last: its presence means that the run is finished

Checkpoint and final hold the checksum of their rows and of the settings, so files of different runs are not taken for one run. Rows
beyond the checkpoint, or half a line of them, are what a killed run leaves; reading ignores the half line and resuming trains those
rounds again.
"""

import contextlib
import json
import math
import os
import re
import tomllib
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..config import BESIDE_THE_POINT, check_kept, defaults
from ..errors import UsageError
from ..files import explained, explained_reading, flush, sweep, write_tensors, write_text
from ..fingerprint import digest
from ..toml import dumps
from .environment import continued, environment
from .find import config_files

try:
    import fcntl
except ImportError:  # not on Windows: two processes in one folder are then the user's care
    fcntl = None  # type: ignore[assignment]

FORMAT = "mimicfl-1"
LENGTHS = ("rounds", "uploads")  # settings that say how long a run is
FILES = ("config.toml", "env.json", "rows.jsonl", "checkpoint.safetensors", "final.safetensors")
MOST_CLIENTS = 10**9  # a larger client number is damage
CHECKED = re.compile(rb', "crc": "([0-9a-f]{8})"}$')  # the end of a row's line
_REMEDY = "delete it, and the run is made good from what is left"
_FROM_START = "delete checkpoint.safetensors and final.safetensors to train it again from the start"
Row = dict[str, Any]


class RunFolder:
    """A run on disk: open an existing one with `RunFolder(path)`, begin or continue one with `RunFolder.claim(path, config)`."""

    def __init__(self, path: str | Path) -> None:
        self.path = as_folder(path)
        if not (self.path / "config.toml").is_file():
            raise UsageError(f"{self.path} is not a run folder: it has no config.toml")
        try:
            self.config: dict[str, Any] = tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        except (ValueError, RecursionError, OSError) as error:
            raise UsageError(f"{self.path / 'config.toml'} cannot be read: {error}") from None
        check_kept(self.config, str(self.path / "config.toml"))
        self._crc = 0  # checksum of the rows written so far
        self._lock: TextIO | None = None

    @classmethod
    def claim(cls, path: str | Path, config: dict[str, Any]) -> "RunFolder":
        """The folder for this run, locked: a new one, or one that already holds a run. The caller checks whether it is the same run."""
        path = as_folder(path)
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
            others = sorted(p.name for p in path.iterdir() if not p.name.startswith(".") and p.name not in FILES)
        if others and not (path / "config.toml").exists():
            raise UsageError(f"{path} is not empty and not a run folder (it holds {others[0]}): choose another folder")
        lock = _lock(path)
        try:
            if not (path / "config.toml").exists():
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

    def begin(self, config: dict[str, Any]) -> None:
        """Start a run with these settings and no rows."""
        self._write_config(config)
        self.keep_rows([])

    def settle(self, config: dict[str, Any]) -> None:
        """Continue the run with these settings, which may make it longer."""
        given = tomllib.loads(dumps(config))
        lengths = {key: given[key] for key in LENGTHS if key in given}
        self._write_config({key: value for key, value in self.config.items() if key not in LENGTHS} | lengths)
        if self.finished:
            (self.path / "final.safetensors").unlink()

    def _write_config(self, config: dict[str, Any]) -> None:
        text = dumps(config)
        if self.config != (kept := tomllib.loads(text)):
            write_text(self.path / "config.toml", text)
            self.config = kept

    def check_config(self, facts: dict[str, str]) -> None:
        """Refuse settings that the checkpoint or result was not made with."""
        pairs = [("config", settings_digest(self.config))] + [("lengths", lengths_digest(self.config))] * self.finished
        if facts.get("round", "0") != "0" and any(facts.get(key, digest_) != digest_ for key, digest_ in pairs):
            raise UsageError(
                f"{self.path / 'config.toml'} does not belong to this run: it was edited or is from another folder; restore the original"
            )

    def close(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.close()
        self._lock = None

    @property
    def finished(self) -> bool:
        return (self.path / "final.safetensors").exists()

    def environment(self) -> dict[str, Any]:
        file = self.path / "env.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def rows(self, facts: Mapping[str, str] = MappingProxyType({})) -> list[Row]:
        """All rows up to the first incomplete line; `facts` are the metadata of the checkpoint or result that counts them."""
        count, found = _count(facts), self._read_rows()
        if len(found) < count:
            raise UsageError(
                f"{self.path / 'rows.jsonl'} is damaged: {len(found)} good rows, but the run had reached round {count}; {_FROM_START}"
            )
        if count and facts.get("rows", found[count - 1][1]) != found[count - 1][1]:
            raise UsageError(f"{self.path / 'rows.jsonl'} does not belong to this run: its rows are from another run; {_FROM_START}")
        return [row for row, _ in found]

    def rows_of(self, facts: Mapping[str, str]) -> list[Row]:
        """The rows that a checkpoint or result counts."""
        return self.rows(facts)[: _count(facts)]

    def _read_rows(self) -> list[tuple[Row, str]]:
        """Every good row with its checksum; rows of earlier versions have none."""
        file = self.path / "rows.jsonl"
        found: list[tuple[Row, str]] = []
        crc = 0
        for line in file.read_bytes().split(b"\n")[:-1] if file.is_file() else []:
            end = CHECKED.search(line)
            body = line[: end.start()] + b"}" if end else line
            crc = zlib.crc32(body, crc)
            row = _parsed(body)
            checked = end is not None and end[1].decode() == f"{crc:08x}"
            legacy = end is None and all(not known for _, known in found)
            if row is None or row["round"] != len(found) or not (checked or legacy):
                break
            found.append((row, f"{crc:08x}" if end else ""))
        return found

    def append(self, row: Row) -> None:
        with explained(self.path / "rows.jsonl"), (self.path / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(self._line(row))  # opened each time: thousands of runs may be active at once

    def keep_rows(self, rows: list[Row]) -> None:
        """Cut the file back to these rows, in one step."""
        self._crc = 0
        write_text(self.path / "rows.jsonl", "".join(map(self._line, rows)))

    def _line(self, row: Row) -> str:
        """A row as a line of the file, with the checksum over it and all rows before it."""
        text = json.dumps(row, allow_nan=False)
        self._crc = zlib.crc32(text.encode(), self._crc)
        return f'{text[:-1]}, "crc": "{self._crc:08x}"}}\n'

    def save(self, name: str, tensors: dict[str, Tensor], **facts: str) -> None:
        """Write `checkpoint` or `final` with a checksum, after the rows are safely on disk."""
        if (self.path / "rows.jsonl").is_file():
            with explained(self.path / "rows.jsonl"):
                flush(self.path / "rows.jsonl")
        flat = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        own = {"format": FORMAT, "crc32": _checksum(flat), "rows": f"{self._crc:08x}", "config": settings_digest(self.config)}
        own["lengths"] = lengths_digest(self.config)
        write_tensors(self.path / f"{name}.safetensors", flat, own | facts)

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """The tensors and facts of `checkpoint` or `final`, or None if it was never written."""
        file = self.path / f"{name}.safetensors"
        if not file.exists():
            return None
        if not file.is_file():
            raise UsageError(f"{file} is damaged (it is not a file): {_REMEDY}")
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


def as_folder(path: Any) -> Path:
    """A folder given by the user, as a path."""
    if not isinstance(path, (str, os.PathLike)) or not (text := os.fspath(path)) or isinstance(text, bytes) or "\0" in text:
        raise UsageError(f"a run folder must be a path such as 'runs/first', got {path!r}")
    with explained_reading(Path(text)):
        (Path(text) / "config.toml").exists()  # a name that is too long, or a folder that must not be entered
    return Path(text)


def _count(facts: Mapping[str, str]) -> int:
    """The number of rounds in a checkpoint or result."""
    round_ = facts.get("round", "0")
    if not round_.isdecimal():
        raise UsageError(f"the round of a checkpoint must be a whole number, got {round_!r}: the file is damaged; {_FROM_START}")
    return int(round_)


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return row if _is_row(row) else None


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not a number that rows may hold")


def _is_row(row: Any) -> bool:
    """Does it have what every reader of rows relies on?"""
    if not isinstance(row, dict) or not isinstance(row.get("clients"), list):
        return False
    counts = all(
        isinstance(row.get(key), int) for key in ("round", "active", "uploads", "vectors_up", "bytes_up", "vectors_down", "bytes_down")
    )
    values = [row.get(key) for key in ("test_accuracy", "test_loss", "train_loss", "distance")]
    finite = all(value is None or (isinstance(value, float) and math.isfinite(value)) for value in values)
    return counts and finite and all(isinstance(client, int) and 0 <= client < MOST_CLIENTS for client in row["clients"])


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
if hasattr(os, "register_at_fork"):  # a forked child would hold the lock even after its parent's death
    os.register_at_fork(after_in_child=lambda: [handle.close() for handle in list(_LOCKS)])


def settings_digest(config: dict[str, Any]) -> str:
    """A hash of the settings that a result depends on, without the run's length, which may grow."""
    return digest(sorted((key, repr(value)) for key, value in config.items() if key not in (*BESIDE_THE_POINT, *LENGTHS)))


def lengths_digest(config: dict[str, Any]) -> str:
    return digest([config.get(key) for key in LENGTHS])


def check_same(folder: RunFolder, config: dict[str, Any], longer: bool = False) -> None:
    """Refuse a folder that was claimed for other settings. `longer` allows more rounds or uploads than the run was started with."""
    if difference := differing_setting(folder, config, longer):
        raise UsageError(f"{folder.path} holds a different run ({difference}); choose another folder")


def differing_setting(folder: RunFolder, config: dict[str, Any], longer: bool = False) -> str:
    """The first setting in which a folder differs, in words; settings unknown to an older version count as their defaults."""
    ours, theirs = defaults() | tomllib.loads(dumps(config)), defaults() | folder.config
    pairs = [(theirs.get(key), ours.get(key)) for key in LENGTHS]
    more = longer and all(a == b or (isinstance(a, int) and isinstance(b, int) and a < b) for a, b in pairs)
    keys = sorted((ours.keys() | theirs.keys()) - set(BESIDE_THE_POINT) - set(LENGTHS if more else ()))
    different = [key for key in keys if ours.get(key) != theirs.get(key)]
    return f"{different[0]} is {theirs.get(different[0])!r} there and {ours.get(different[0])!r} here" if different else ""


def find_runs(paths: list[str | Path]) -> list[RunFolder]:
    """The run folders at or below these paths, in order."""
    found: dict[Path, RunFolder] = {}
    for path in map(as_folder, paths):
        if not path.exists():
            raise UsageError(f"{path} does not exist")
        below = config_files(path)
        if not below:
            raise UsageError(f"{path} holds no run: no config.toml in it or below it")
        for folder in below:
            found.setdefault(folder.resolve(), RunFolder(folder))
    return list(found.values())
