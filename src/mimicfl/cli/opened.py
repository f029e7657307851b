"""Records the files that plugins read while a sweep is prepared, with an audit hook of the interpreter."""

import os
import sys
from collections.abc import Collection
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ..fingerprint.installed import is_installed

OF_THE_SYSTEM = ("/proc/", "/sys/", "/dev/")  # their contents change without a new time stamp
COMPRESSED = (".gz", ".bz2", ".xz")  # NumPy reads `x.csv.gz` where a plugin names `x.csv`, if only the former exists
Stamp = list[int]
WRITES = os.O_WRONLY | os.O_RDWR
PACKAGE = Path(__file__).parent.parent
IMPORTS = "<frozen importlib"
_current: "Opened | None" = None


class Opened:
    """Records the files that are opened within `with`, except those of the runs.

    `code`: the source files of the plugins; `target`: the folder of the runs.
    """

    def __init__(self, code: Collection[str], target: Path) -> None:
        self.target = str(target.absolute())
        self.code, self.read, self.doubtful = frozenset(code), dict[str, Stamp](), False

    def __enter__(self) -> "Opened":
        global _current
        if not _hooked:
            sys.addaudithook(_hear)  # an audit hook cannot be removed
            _hooked.append(True)
        _current = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        global _current
        _current = None

    def note(self, name: str, writes: bool) -> None:
        """Record a file that is about to be opened, with its stamp, so that a later edit is noticed."""
        frame = sys._getframe(2)
        if frame.f_code.co_filename.startswith(IMPORTS) or name in self.code or Path(name).is_relative_to(PACKAGE):
            return  # code is compared by its content
        try:
            now = None if writes or name.startswith(OF_THE_SYSTEM) else stamp(Path(name))
        except OSError:  # it does not exist
            now = None
        if now is None:
            self.doubtful |= self._by_plugin(frame)
        elif self._by_plugin(frame) or not (is_installed(name) or Path(name).is_relative_to(self.target)):
            self.doubtful |= self.read.setdefault(name, now) != now or name.endswith(COMPRESSED)

    def _by_plugin(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if os.path.realpath(frame.f_code.co_filename) in self.code:
                return True
            frame = frame.f_back
        return False

    def files(self) -> dict[str, Stamp] | None:
        """The files that plugins may have read besides their code, with their stamps; None if the plugins may depend on anything else."""
        return None if self.doubtful else self.read


def stamp(file: Path) -> Stamp:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]  # ctime: unlike mtime, a program cannot set it back


_hooked: list[bool] = []


def _hear(event: str, details: tuple[Any, ...]) -> None:
    current = _current  # another thread may end the recording meanwhile
    if event == "open" and current is not None and isinstance(details[0], (str, bytes, os.PathLike)):
        mode, flags = details[1], details[2]
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else bool(isinstance(flags, int) and flags & WRITES)
        current.note(os.path.abspath(os.fsdecode(details[0])), writes)
