"""Writing files so that a reader, or a process killed at any moment, never meets half of one."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UsageError


class WriteFailed(UsageError):
    """A file could not be written (disk full, no permission); what was there before is still there."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an operating system error while writing `path` into a sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise WriteFailed(f"could not write {path}: {reason}; make room or choose another folder, then go on where it stopped") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to the yielded path; at the end it is flushed to disk and takes the place of `path` in one step."""
    with explained(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        partial = Path(name)
        try:
            yield partial
            descriptor = os.open(partial, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            partial.chmod(0o644)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def sweep(folder: Path) -> None:
    """Remove what killed writers left behind."""
    for leftover in folder.glob(".*.part"):
        leftover.unlink(missing_ok=True)
