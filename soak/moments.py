"""Chooses when a signal is sent: after some time, or as soon as a file appears or changes."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .processes import Process

PAUSE = 0.0005  # seconds between two polls
State = dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Moment:
    """A moment: `seconds` after the start or, with a `name`, `seconds` after files with that name have changed `times` times."""

    seconds: float
    name: str = ""
    times: int = 1

    def __str__(self) -> str:
        after = f"{1000 * self.seconds:.0f} ms after"
        return f"{after} change {self.times} of *{self.name}*" if self.name else f"{after} the start"

    def wait(self, process: Process, folders: list[Path], limit: float) -> bool:
        """Wait for the moment; return False if the process ended first."""
        until = time.monotonic() + limit
        before, seen = _state(folders, self.name), 0
        while self.name and seen < self.times:
            if process.wait(PAUSE) is not None or time.monotonic() > until:
                return False
            now = _state(folders, self.name)
            seen += len(now.items() - before.items())
            before = now
        return process.wait(self.seconds) is None


def draw(chance: np.random.Generator, duration: float, names: dict[str, int]) -> Moment:
    """Draw a moment: half of them follow a change of a file, half fall anywhere in the duration of the command.

    `names` gives the maximum number of changes to wait for, per file.
    """
    if chance.random() < 0.5:
        return Moment(float(chance.uniform(0, duration)))
    name = str(chance.choice(list(names)))
    return Moment(float(chance.choice([0, chance.uniform(0, 0.005)])), name, int(chance.integers(1, names[name] + 1)))


def _state(folders: list[Path], name: str) -> State:
    return {entry.path: _stat(entry) for folder in folders for entry in walk(folder) if name and name in entry.name}


def _stat(entry: "os.DirEntry[str]") -> tuple[int, int, int]:
    try:
        found = entry.stat(follow_symlinks=False)
    except OSError:  # already deleted
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def walk(folder: Path | str) -> Iterator["os.DirEntry[str]"]:
    """Yield all files below a folder, even while it changes."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from walk(entry.path)
        else:
            yield entry
