"""Simulates a nearly full disk: a small in-memory file system if mounting is allowed, otherwise a limit on file sizes."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """Mount a file system of `size` bytes at `folder`; yields False if file systems cannot be mounted."""
    folder.mkdir(parents=True)
    mounted = _run("mount", "-t", "tmpfs", "-o", f"size={size}", "soak", str(folder))
    try:
        yield mounted
    finally:
        if mounted:
            unmount(folder)


def make_room(folder: Path) -> None:
    if not _run("mount", "-o", "remount,size=256m", str(folder)):
        raise RuntimeError(f"{folder} cannot be enlarged")


def unmount(folder: Path) -> None:
    """Unmount now, or as soon as the last process that uses it has ended."""
    _run("umount", str(folder)) or _run("umount", "--lazy", str(folder))


def unmount_all(folder: Path) -> None:
    """Unmount the file systems that a killed soak left below this folder."""
    mounts = Path("/proc/self/mounts")
    for line in mounts.read_text(encoding="utf-8").splitlines() if mounts.exists() else []:
        source, target = line.split()[:2]
        if source == "soak" and Path(target).is_relative_to(folder.resolve()):
            unmount(Path(target))


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False
