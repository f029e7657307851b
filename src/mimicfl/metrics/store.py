"""One run is one folder, consistent even if the process is killed at any moment.

    config.toml              the settings, written first, under a lock
    env.json                 versions and hardware
    rows.jsonl               one line per round, appended; each ends with a checksum of itself and all lines before it
    checkpoint.safetensors   model, algorithm state and round; replaced atomically, after its rows are on disk
    final.safetensors        written last: it exists if and only if the run is finished

Checkpoint and final hold the checksums of their rows and of the settings, so files of different runs cannot be mixed. A killed run may
leave rows beyond its checkpoint and an incomplete last line. Readers ignore the incomplete line, and resuming repeats those rounds.
"""

import contextlib
import json
import os
import tomllib
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UsageError
from ..files import explained, make_folder, remove_leftovers, write_tensors, write_text
from ..fingerprint import digest
from ..settings import NOT_IN_RESULT, check_kept, defaults
from ..toml import dumps
from .environment import continued, environment
from .find import config_files, is_finished
from .lock import lock_folder
from .rows import Row, RowsFile, number_of_rounds

FORMAT = "mimicfl-1"
LENGTHS = ("rounds", "uploads")  # settings that determine the length of a run
FILES = ("config.toml", "env.json", "rows.jsonl", "checkpoint.safetensors", "final.safetensors")
_REMEDY = "delete it and resume the run"


class RunFolder:
    """A run on disk: open an existing one with `RunFolder(path)`, start or resume one with `RunFolder.claim(path, config)`."""

    def __init__(self, path: str | Path) -> None:
        self.path = as_folder(path)
        if not (self.path / "config.toml").is_file():
            raise UsageError(f"{self.path} is not a run folder: it has no config.toml")
        try:
            self.config: dict[str, Any] = tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        except (ValueError, RecursionError, OSError) as error:
            raise UsageError(f"{self.path / 'config.toml'} cannot be read: {error}") from None
        check_kept(self.config, str(self.path / "config.toml"))
        self._rows = RowsFile(self.path / "rows.jsonl")
        self._lock: TextIO | None = None

    @classmethod
    def claim(cls, path: str | Path, config: dict[str, Any]) -> "RunFolder":
        """Create or open the folder of a run and lock it. The caller checks whether an existing run is the same one."""
        path = as_folder(path)
        with explained(make_folder(path)):
            others = sorted(p.name for p in path.iterdir() if not p.name.startswith(".") and p.name not in FILES)
        if others and not (path / "config.toml").exists():
            raise UsageError(f"{path} is not empty and not a run folder (it holds {others[0]}); choose another folder")
        lock = lock_folder(path)
        try:
            if not (path / "config.toml").exists():
                write_text(path / "config.toml", dumps(config))
            folder = cls(path)
            if not folder.finished:
                known, here = folder.environment(), environment()
                write_text(path / "env.json", json.dumps(continued(known, here) if known else here, indent=2) + "\n")
            remove_leftovers(path, FILES)
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

    def extend(self, config: dict[str, Any]) -> None:
        """Resume the run with these settings, which may make it longer."""
        given = tomllib.loads(dumps(config))
        lengths = {key: given[key] for key in LENGTHS if key in given}
        self._write_config({key: value for key, value in self.config.items() if key not in LENGTHS} | lengths)
        self.reopen()

    def reopen(self) -> None:
        """Remove the result of a finished run, which will now run for more rounds or again."""
        (self.path / "final.safetensors").unlink(missing_ok=True)

    def _write_config(self, config: dict[str, Any]) -> None:
        text = dumps(config)
        if self.config != (kept := tomllib.loads(text)):
            write_text(self.path / "config.toml", text)
            self.config = kept

    def check_config(self, facts: dict[str, str]) -> None:
        """Raise `UsageError` if the checkpoint or result was made with other settings."""
        pairs = [("config", settings_digest(self.config))] + [("lengths", lengths_digest(self.config))] * self.finished
        if facts.get("round", "0") != "0" and any(facts.get(key, digest_) != digest_ for key, digest_ in pairs):
            raise UsageError(
                f"{self.path / 'config.toml'} does not belong to this run: it was edited or comes from another folder; restore the original"
            )

    def close(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.close()
        self._lock = None

    @property
    def finished(self) -> bool:
        return is_finished(self.path)

    def environment(self) -> dict[str, Any]:
        file = self.path / "env.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def rows(self, facts: Mapping[str, str] = MappingProxyType({})) -> list[Row]:
        """All rows up to the first incomplete line, checked against `facts`, the metadata of the checkpoint or result."""
        return self._rows.read(facts)

    def rows_of(self, facts: Mapping[str, str]) -> list[Row]:
        """The rows of the rounds that a checkpoint or result includes."""
        return self.rows(facts)[: number_of_rounds(facts)]

    def append(self, row: Row) -> None:
        self._rows.append(row)

    def keep_rows(self, rows: list[Row]) -> None:
        """Keep only these rows."""
        self._rows.replace(rows)

    def save(self, name: str, tensors: dict[str, Tensor], **facts: str) -> None:
        """Write `checkpoint` or `final` with a checksum, after flushing the rows to disk."""
        self._rows.flush()
        flat = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        metadata = {"format": FORMAT, "crc32": checksum(flat), "rows": f"{self._rows.crc:08x}", "config": settings_digest(self.config)}
        metadata["lengths"] = lengths_digest(self.config)
        write_tensors(self.path / f"{name}.safetensors", flat, metadata | facts)

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """The tensors and metadata of `checkpoint` or `final`, or None if the file does not exist."""
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
            raise UsageError(f"{file} has format {facts.get('format')!r}, expected {FORMAT!r}; read it with the mimicfl that wrote it")
        if facts.get("crc32") != checksum(tensors):
            raise UsageError(f"{file} is damaged (its checksum is wrong): {_REMEDY}")
        return tensors, facts


def as_folder(path: Any) -> Path:
    """Convert a folder given by the user to a path; raises `UsageError` if it cannot be one."""
    if not isinstance(path, (str, os.PathLike)) or not (text := os.fspath(path)) or isinstance(text, bytes) or "\0" in text:
        raise UsageError(f"a run folder must be a path such as 'runs/first', got {path!r}")
    try:
        (Path(text) / "config.toml").exists()  # fails if the name is too long or permission is missing
    except OSError as error:
        raise UsageError(f"{text[:200]} cannot be read: {error.strerror or error}") from None
    return Path(text)


def checksum(tensors: dict[str, Tensor]) -> str:
    """A checksum of names and values."""
    crc = 0
    for key in sorted(tensors):
        raw = tensors[key].reshape(-1).view(torch.uint8) if tensors[key].numel() else torch.empty(0, dtype=torch.uint8)
        crc = zlib.crc32(raw.numpy().data, zlib.crc32(key.encode(), crc))
    return f"{crc:08x}"


def settings_digest(config: dict[str, Any]) -> str:
    """A hash of the settings that a result depends on, without the length of the run, which may be extended."""
    return digest(sorted((key, repr(value)) for key, value in config.items() if key not in (*NOT_IN_RESULT, *LENGTHS)))


def lengths_digest(config: dict[str, Any]) -> str:
    """A hash of the settings that determine the length of a run."""
    return digest([config.get(key) for key in LENGTHS])


def check_same(folder: RunFolder, config: dict[str, Any]) -> None:
    """Raise `UsageError` if the folder holds a run with other settings; it may be given more rounds or uploads."""
    if difference := differing_setting(folder, config, longer=True):
        raise UsageError(f"{folder.path} holds a different run ({difference}); choose another folder")


def differing_setting(folder: RunFolder, config: dict[str, Any], longer: bool) -> str:
    """A description of the first setting that differs, or an empty text. Settings that an older version lacks have their defaults.

    `longer` allows more rounds or uploads than the run was started with.
    """
    ours, theirs = defaults() | tomllib.loads(dumps(config)), defaults() | folder.config
    pairs = [(theirs.get(key), ours.get(key)) for key in LENGTHS]
    more = longer and all(a == b or (isinstance(a, int) and isinstance(b, int) and a < b) for a, b in pairs)
    keys = sorted((ours.keys() | theirs.keys()) - set(NOT_IN_RESULT) - set(LENGTHS if more else ()))
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
            raise UsageError(f"{path} holds no run: there is no config.toml in it or below it")
        for folder in below:
            found.setdefault(folder.resolve(), RunFolder(folder))
    return list(found.values())
