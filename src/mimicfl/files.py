"""Writing files so that a reader, or a process killed at any moment, never meets half of one."""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

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
        partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
        try:
            yield partial
            _flush(partial)
            partial.replace(path)
            _flush(path.parent)  # the new name, too, must survive a power cut
        finally:
            partial.unlink(missing_ok=True)


def _flush(path: Path) -> None:
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
    """Remove what killed writers of these files left behind."""
    for name in names:
        for leftover in folder.glob(f".{name}.*.part"):
            leftover.unlink(missing_ok=True)
