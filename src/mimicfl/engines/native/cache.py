"""The compile cache: a folder of libraries that only the user can write. Each library is checked before it is loaded.

The folder is accessed through an open descriptor, so it cannot be replaced between check and use. A library's name contains the
SHA-256 of its content. Every compile holds a lock as long as the compiler runs, even if its parent is killed.
"""

import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...data.download import cache_dir
from ...errors import UsageError
from ..capabilities import Unsupported

try:
    import fcntl
except ImportError:  # Windows, where the engine is refused earlier
    fcntl = None  # type: ignore[assignment]

PROC = "/proc/self/fd"
WAIT = 600  # seconds to wait for another process that compiles
EVERY = "all.lock"  # shared by all compiles; a process that holds it exclusively knows that no compile is running
OTHER_FOLDER = "set MIMICFL_CACHE to a folder of your own"


class Cache:
    """An open folder that only the user can write."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor

    def reach(self, name: str = "") -> str:
        """Return a path to this folder, or to a file in it, for a loader or a child process."""
        # Without /proc (macOS) the path is resolved again; the folder is then only as safe as its parents.
        return os.path.join(f"{PROC}/{self.descriptor}" if os.path.isdir(PROC) else str(self.path), name)

    def find(self, key: str) -> str | None:
        """Return the name of the library with this key, or None. Files with that key that are not valid libraries are removed."""
        for name in sorted(os.listdir(self.descriptor)):
            if name.startswith(f"{key}-") and name.endswith(".so"):
                if self._sound(name, key):
                    return name
                self.drop(name)
        return None

    def _sound(self, name: str, key: str) -> bool:
        """Return whether it is a regular file that only the user can write and whose content has the hash in its name."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: opening a pipe of this name must not block
        try:
            descriptor = os.open(name, flags, dir_fd=self.descriptor)
        except OSError:
            return False
        with os.fdopen(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
                return False
            return name == library_name(key, hashlib.file_digest(file, "sha256").hexdigest())

    def drop(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def partial(self, key: str) -> str:
        return f".{key}-{os.getpid()}-{secrets.token_hex(4)}.part"

    def keep(self, key: str, partial: str) -> str:
        """Move a compiled library to its final name atomically, once its content is on disk."""
        descriptor = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor)
        with os.fdopen(descriptor, "rb") as file:
            os.fchmod(descriptor, 0o700)  # the linker follows the umask, which may allow group writes
            name = library_name(key, hashlib.file_digest(file, "sha256").hexdigest())
            os.fsync(descriptor)
        os.rename(partial, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        os.fsync(self.descriptor)
        return name

    @contextmanager
    def compiling(self, key: str) -> Iterator[tuple[int, ...]]:
        """Let one process at a time compile a key. The compiler must inherit the yielded descriptors, which hold the locks."""
        with self._file(EVERY) as every:
            if _try_lock(every, fcntl.LOCK_EX):
                self._sweep()
            _lock(every, fcntl.LOCK_SH)
            with self._file(f"{key}.lock") as own:
                _lock(own, fcntl.LOCK_EX)
                yield every, own

    @contextmanager
    def _file(self, name: str) -> Iterator[int]:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        """Remove the files that killed compiles left behind. The caller must know that no compile is running."""
        for name in os.listdir(self.descriptor):
            if name.endswith((".part", ".lock")) and name != EVERY:
                self.drop(name)


def library_name(key: str, digest: str) -> str:
    return f"{key}-{digest}.so"


@contextmanager
def compile_cache() -> Iterator[Cache]:
    """Open the user's compile cache. Raises `Unsupported`, with a remedy, if it cannot be used or made private."""
    try:
        path = cache_dir() / f"native-{os.geteuid()}"  # one per user, so that datasets can stay in a shared cache
    except UsageError as error:
        raise Unsupported(str(error)) from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if path.is_symlink():
            raise Unsupported(f"the compile cache {path} is a symbolic link; delete it, or {OTHER_FOLDER}")
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _make_private(path, descriptor)
            yield Cache(path, descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Unsupported(f"the compile cache {path} cannot be used ({error.strerror or error}); {OTHER_FOLDER}") from None


def _make_private(path: Path, descriptor: int) -> None:
    info = os.fstat(descriptor)
    if info.st_uid != os.geteuid():
        raise Unsupported(f"the compile cache {path} belongs to another user; {OTHER_FOLDER}")
    if info.st_mode & 0o077:
        os.fchmod(descriptor, 0o700)
    if os.fstat(descriptor).st_mode & 0o077:  # file systems without permissions ignore chmod silently
        raise Unsupported(f"the compile cache {path} is open to other users and chmod 700 has no effect there; {OTHER_FOLDER}")


def _try_lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(descriptor: int, how: int) -> None:
    deadline = time.monotonic() + WAIT
    while not _try_lock(descriptor, how):
        if time.monotonic() > deadline:
            raise Unsupported(f"another process has been compiling for more than {WAIT} s; end it, or {OTHER_FOLDER}")
        time.sleep(0.05)
