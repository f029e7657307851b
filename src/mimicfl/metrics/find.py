"""Find the run folders at or below a folder with a bounded search."""

import contextlib
import os
from pathlib import Path

from ..errors import UsageError

CONFIG = "config.toml"
MOST_FOLDERS, DEEPEST = 100_000, 32
_REMEDY = "give the folder that holds the runs, such as runs/demo"


def is_finished(path: Path) -> bool:
    """Does the run folder hold a result? It is written last."""
    return (path / "final.safetensors").exists()


def config_files(path: Path) -> list[Path]:
    """The run folders at or below `path`, sorted.

    Hidden folders, symbolic links and the inside of run folders are not searched. Raises `UsageError` for the root of a file system, for
    the home folder, and for trees with more than MOST_FOLDERS folders or DEEPEST levels.
    """
    if (path / CONFIG).is_file():
        return [path]
    _check_start(path)
    found: list[Path] = []
    waiting, visited = [(path, 0)], 0
    while waiting:
        folder, depth = waiting.pop()
        visited += 1
        if visited > MOST_FOLDERS or depth > DEEPEST:
            size = f"more than {MOST_FOLDERS:,} folders" if visited > MOST_FOLDERS else f"folders more than {DEEPEST} levels deep"
            raise UsageError(f"{path} is too large to search for runs: it holds {size}; {_REMEDY}")
        names, is_run = _scan(folder)
        if is_run:
            found.append(folder)
        else:
            waiting += [(folder / name, depth + 1) for name in names]
    return sorted(found)


def _check_start(path: Path) -> None:
    real = path.resolve()
    with contextlib.suppress(RuntimeError):  # the user has no home folder
        if real == Path.home().resolve():
            raise UsageError(f"{path} is the home folder, which is too large to search for runs; {_REMEDY}")
    if real.parent == real:
        raise UsageError(f"{path} is the root of a file system, which is too large to search for runs; {_REMEDY}")


def _scan(folder: Path) -> tuple[list[str], bool]:
    """The names of subfolders that may hold runs, and whether the folder itself is a run."""
    names = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name == CONFIG and entry.is_file():
                    return [], True
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    names.append(entry.name)
    except OSError as error:
        raise UsageError(f"{folder} cannot be searched for runs ({error.strerror or error}); give the folders of the runs") from None
    return names, False
