"""Writing files so that a reader, or a process killed at any moment, never meets half of one."""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .errors import UsageError

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

SAFETENSORS_LEFTOVER = ".tmp??????"  # safetensors first writes to a file of this name
WRITER = re.compile(r"\.(\d+)-[0-9a-f]{8}\.part$")  # the process id in the name of an unfinished file
MANY_FILES = 100_000


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
def explained_reading(path: Path) -> Iterator[None]:
    """Turn an operating system error about `path` into a `UsageError`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{str(path)[:200]} cannot be read: {error.strerror or error}") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to the yielded path; at the end it is flushed to disk and takes the place of `path` in one step."""
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


_unfinished: set[Path] = set()  # files that this process is writing


def drop_unfinished() -> None:
    """Remove what this process was writing, before it ends in the middle of it."""
    for partial in list(_unfinished):
        partial.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until the content is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: dict[str, Tensor], facts: dict[str, str] | None = None) -> None:
    """A safetensors file; tensors that share memory are separated first, since the format knows no sharing."""
    seen: set[int] = set()
    flat = {}
    for key, value in tensors.items():
        tensor = value.detach().cpu().contiguous()
        flat[key] = tensor.clone() if tensor.untyped_storage().data_ptr() in seen else tensor
        seen.add(tensor.untyped_storage().data_ptr())
    with replacing(path) as partial:
        try:
            save_file(flat, partial, metadata=facts)
        except SafetensorError as error:  # the library wraps the operating system's error in its own
            raise OSError(str(error)) from error


def sweep(folder: Path, names: Sequence[str]) -> None:
    """Remove temporary files that killed writers left behind; the caller holds the folder's lock."""
    for leftover in [*(path for name in names for path in folder.glob(f".{name}.*.part")), *folder.glob(SAFETENSORS_LEFTOVER)]:
        leftover.unlink(missing_ok=True)


def sweep_dead(folder: Path) -> None:
    """Remove temporary files from a folder without a lock, if their writers were processes of this machine that have ended."""
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
    """How many files this process may open, after raising the limit as far as the system allows."""
    if resource is None:
        return 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MANY_FILES) if hard != resource.RLIM_INFINITY else MANY_FILES
