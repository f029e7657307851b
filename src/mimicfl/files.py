"""Atomic file writes: a file is complete or absent, even if the writing process is killed."""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

SAFETENSORS_LEFTOVER = ".tmp??????"  # safetensors writes to a temporary file with such a name first
WRITER = re.compile(r"\.(\d+)-[0-9a-f]{8}\.part$")  # extracts the process id from the name of an unfinished file
MANY_FILES = 100_000


class WriteFailed(UsageError):
    """A file could not be written (disk full, no permission); an earlier version of the file is unchanged."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an operating system error while writing `path` into a `WriteFailed`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise WriteFailed(f"could not write {path}: {reason}; make room or choose another folder, then resume") from error


def make_folder(path: Path) -> Path:
    """Create the folder, and those above it, if they do not exist."""
    with explained(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; on exit it is flushed to disk and replaces `path` atomically."""
    with explained(path):
        partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
        _unfinished.add(partial)
        try:
            yield partial
            flush(partial)
            partial.replace(path)
            flush(path.parent)  # the new name must also survive a power failure
        finally:
            partial.unlink(missing_ok=True)
            _unfinished.discard(partial)


_unfinished: set[Path] = set()  # temporary files that this process is writing


def drop_unfinished() -> None:
    """Remove the temporary files of this process, before it exits in the middle of a write."""
    for partial in list(_unfinished):
        partial.unlink(missing_ok=True)


_scratch = False


@contextmanager
def scratch() -> Iterator[None]:
    """Folders written in this block are only kept until their results have been read.

    They survive a killed process, but not a power failure: nothing waits for the disk, and rows are written with checkpoints. Finished
    runs keep no state to extend them from.
    """
    global _scratch
    before, _scratch = _scratch, True
    try:
        yield
    finally:
        _scratch = before


def is_scratch() -> bool:
    return _scratch


def flush(path: Path) -> None:
    """Wait until the content is on disk."""
    if _scratch:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: "dict[str, Tensor]", facts: dict[str, str] | None = None) -> None:
    """Write a safetensors file. Tensors that share memory are copied first, since the format does not support sharing."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file  # here: it imports PyTorch, which commands that only read text do not need

    seen: set[int] = set()
    flat = {}
    for key, value in tensors.items():
        tensor = value.detach().cpu().contiguous()
        flat[key] = tensor.clone() if tensor.untyped_storage().data_ptr() in seen else tensor
        seen.add(tensor.untyped_storage().data_ptr())
    with replacing(path) as partial:
        try:
            save_file(flat, partial, metadata=facts)
        except SafetensorError as error:  # safetensors wraps operating system errors in its own type
            raise OSError(str(error)) from error


def remove_leftovers(folder: Path, names: Sequence[str]) -> None:
    """Remove temporary files left behind by killed processes; the caller must hold the folder's lock."""
    for leftover in [*(path for name in names for path in folder.glob(f".{name}.*.part")), *folder.glob(SAFETENSORS_LEFTOVER)]:
        leftover.unlink(missing_ok=True)


def remove_dead(folder: Path) -> None:
    """Remove temporary files whose writers have ended, from a folder without a lock. Writers must be processes of this machine."""
    for leftover in folder.glob(".*.part"):
        if (owner := WRITER.search(leftover.name)) and not _alive(int(owner[1])):
            leftover.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process
        return True
    return True


def open_files() -> int:
    """Raise this process's limit on open files as far as the system allows, and return the new limit."""
    if resource is None:
        return 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MANY_FILES) if hard != resource.RLIM_INFINITY else MANY_FILES
