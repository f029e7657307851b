"""The output of a finished sweep, stored with its runs: the same command prints it again at once if nothing has changed.

The memo is only a shortcut. It is used if the command, the settings file, the code of this package and every file of the runs are the
same; otherwise the runs are inspected one by one, as if there were no memo. Sweeps that depend on other files (plugins, a data folder,
a schedule in a file) have no memo.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..files import write_text
from ..settings import read_settings

NAME = ".finished.json"
FILES = ("config.toml", "rows.jsonl", "final.safetensors")


@dataclass(frozen=True)
class Memo:
    file: Path
    key: str

    @classmethod
    def of(cls, target: Path, settings: str, given: dict[str, Any], console: Console) -> "Memo | None":
        """The memo of this command; None if its result depends on files that the memo does not check."""
        written = read_settings(Path(settings))
        if any(_is_file(text) for text in _texts([written, given])) or {"plugins", "data_path"} & {*written, *given}:
            return None
        facts = [Path(settings).read_text(encoding="utf-8"), given, str(target), console.width, _code()]
        return cls(target / NAME, hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest())

    def replay(self, console: Console) -> bool:
        """Print what the finished command printed; False if anything has changed since."""
        try:
            held = json.loads(self.file.read_text(encoding="utf-8"))
            same = held["key"] == self.key and all(_stamp(Path(name)) == stamp for name, stamp in held["files"].items())
            shown = str(held["shown"]) if same else ""
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return False
        if shown:
            console.print(Text.from_ansi(shown), soft_wrap=True)
            console.print("all runs are finished", style="dim")
        return bool(shown)

    def keep(self, shown: str, runs: Iterable[Path], pages: Sequence[Path]) -> None:
        files = [*(run / name for run in runs for name in FILES), *pages]
        with contextlib.suppress(OSError):  # only a shortcut
            write_text(self.file, json.dumps({"key": self.key, "shown": shown, "files": {str(file): _stamp(file) for file in files}}))


def _stamp(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _is_file(text: str) -> bool:
    """Does a spec such as `explicit:schedule.csv` name a file?"""
    try:
        return "/" in text or any(part and Path(part).exists() for part in re.split(r"[:,=]", text))
    except OSError:  # too long to be a file name
        return False


def _code() -> str:
    """A hash of this package's source: another version of an algorithm has another result."""
    found = hashlib.sha256()
    for file in sorted(Path(__file__).parent.parent.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()
