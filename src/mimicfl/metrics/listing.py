"""Inspect run folders quickly: status, rounds and last values, without PyTorch and without reading whole files.

Nothing is verified here; `mimicfl.metrics.store` does that when a run is read.
"""

import json
import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..settings import NOT_IN_RESULT, with_added_later
from .columns import primary
from .find import config_files, is_finished
from .lock import is_locked

TAIL = 1 << 18  # bytes at the end of rows.jsonl that are searched for the last values
HIDDEN = ("source", "preset", *(name for name in NOT_IN_RESULT if name != "device"))


@dataclass(frozen=True)
class Listed:
    """One run, as stored on disk."""

    path: Path
    status: str  # finished, running, interrupted or damaged
    config: dict[str, Any]
    rounds: int
    last: dict[str, Any]  # the last value of every column of the rows that is a number
    changed: float  # seconds since the epoch

    @property
    def metric(self) -> str:
        return primary(self.last, self.config) or "test_loss"


def list_runs(folder: str | Path) -> list[Listed]:
    """The runs at or below a folder."""
    path = Path(folder)
    if not path.exists():
        raise UsageError(f"{path} does not exist; give the folder that holds the runs")
    return [listed(each) for each in config_files(path)]


def listed(path: Path) -> Listed:
    """One run folder; a folder that cannot be read is `damaged`."""
    try:
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
        repr(config)  # raises a ValueError for integers with thousands of digits, which TOML allows in hexadecimal
        rows = _last_rows(path / "rows.jsonl")
    except (OSError, ValueError, RecursionError):
        return Listed(path, "damaged", {}, 0, {}, _changed(path))
    last: dict[str, Any] = {}
    for row in rows:  # a later row replaces an earlier value
        last |= {key: value for key, value in row.items() if _is_number(value)}
    rounds = last.get("round", -1)
    return Listed(path, state_of(path), config, rounds + 1 if isinstance(rounds, int) else 0, last, _changed(path))


def state_of(path: Path) -> str:
    """Of a run folder that can be read: finished, running (a process holds its lock) or interrupted."""
    return "finished" if is_finished(path) else "running" if is_locked(path) else "interrupted"


def differing(runs: list[Listed]) -> list[str]:
    """The settings in which the runs differ, algorithm and seed first."""
    configs = [with_added_later(run.config) for run in runs if run.config]
    keys = dict.fromkeys(["algorithm", "seed", *(key for config in configs for key in config)])
    varied = [key for key in keys if key not in HIDDEN and len({repr(config.get(key)) for config in configs}) > 1]
    return varied if "algorithm" in varied else ["algorithm", *varied]


def _last_rows(file: Path) -> list[dict[str, Any]]:
    """The rows near the end of the file, without an incomplete last line."""
    if not file.is_file():
        return []
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - TAIL))
        lines = opened.read().split(b"\n")[:-1]
    found = [_parsed(line) for line in (lines if size <= TAIL else lines[1:])]
    return [row for row in found if row is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _is_number(value: Any) -> bool:
    """Is it a number that a float can hold? JSON allows larger integers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _changed(path: Path) -> float:
    times = [file.stat().st_mtime for name in ("config.toml", "rows.jsonl", "final.safetensors") if (file := path / name).exists()]
    return max(times, default=0.0)
