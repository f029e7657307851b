"""The lock of a run folder: one process at a time writes to it. And the lock of a folder of records, which is held for a moment."""

import contextlib
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ..errors import UsageError
from ..files import explained

try:
    import fcntl
except ImportError:  # Windows has no fcntl: two processes in one folder are not detected there
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
ATTEMPTS, WAIT = 3, 0.02  # seconds: `is_locked` holds the lock for a moment


def lock_folder(path: Path) -> TextIO | None:
    """Lock the folder against a second writer. The operating system releases the lock when the process ends."""
    if fcntl is None:
        return None
    with explained(path):
        handle = (path / NAME).open("a")
        for _ in range(ATTEMPTS):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(WAIT)
                continue
            _LOCKS.add(handle)
            return handle
        handle.close()
    raise UsageError(f"{path} is being written by another process; wait for it to finish or choose another folder")


def is_locked(path: Path) -> bool:
    """Does a process hold the folder's lock? False if that cannot be found out."""
    if fcntl is None or not (path / NAME).exists():
        return False
    try:
        with (path / NAME).open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no permission, or a file system without locks
        return False
    return False


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder within `with`, after waiting for other processes; leaves no file in it."""
    if fcntl is None:
        yield
        return
    with explained(folder):
        handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


_LOCKS: weakref.WeakSet[TextIO] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # a forked child would hold the lock after its parent has ended
    os.register_at_fork(after_in_child=lambda: [handle.close() for handle in list(_LOCKS)])
