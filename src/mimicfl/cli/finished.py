"""The output of a finished sweep, stored with its runs: the same command prints it again at once if nothing has changed.

The memo is only a shortcut. It is used directly if nothing has changed: the command, the settings file, this package, the versions of
Python, PyTorch and NumPy, the code of the plugins, the data, the runs, and the files that plugins read. A sweep that may depend on anything
else, such as environment variables, has an uncertain memo: the plugins are imported and every run is inspected, as without a memo, and only
the reports are not written again.
"""

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..files import write_text
from ..settings import read_settings
from .opened import Opened, stamp
from .plugin_code import Code, Doubt, imported_as_found, plugin_code

NAME = ".finished.json"
MOST_PARTS = 60  # of a setting whose text may contain file names
MOST_FILES = 10_000  # of a data folder: listing more would take longer than it saves
FILES = ("config.toml", "rows.jsonl", "final.safetensors", "env.json")  # of a run
WRITTEN = (".html", ".png", ".svg", ".pdf", ".csv", ".tex")  # beside a report


@dataclass(frozen=True)
class Memo:
    file: Path
    key: str
    code: Code = field(default_factory=Code)  # of plugins
    modules: frozenset[str] = field(default_factory=frozenset, compare=False)  # imported before the plugins
    certain: bool = True  # False: the result may depend on something that the memo does not check

    @classmethod
    def of(cls, target: Path, settings: str, given: dict[str, Any], console: Console, options: Sequence[Any] = ()) -> "Memo":
        """The memo of this command."""
        chosen = read_settings(Path(settings)) | given
        code, data = _plugin_code(chosen.pop("plugins", [])), _data_files(chosen.pop("data_path", None), _texts(chosen))
        varied = {str(name).replace("-", "_") for name in grid} if isinstance(grid := chosen.get("grid"), dict) else set()
        certain = code is not None and data is not None and not {"plugins", "data_path"} & varied
        stamps = {str(file): stamp(file) for file in data or ()} if certain else {}
        command = [Path(settings).read_text(encoding="utf-8"), given, str(target), console.width, *options]
        # With a cluster or trackers, files may also be read elsewhere, where they are not recorded.
        certain = certain and not (code is not None and code.reads and any(options))
        facts = [*command, _code(), _versions(), code.files if code and certain else None, stamps, certain, str(Path.cwd())]
        key = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
        return cls(target / NAME, key, code if code and certain else Code(), frozenset(sys.modules), certain)

    def recording(self) -> Opened:
        """Records the files that are read within `with`, while plugins are imported and runs are prepared."""
        return Opened(self.code.files, self.file.parent)

    def replay(self, console: Console, runs: Iterable[Path] | None = None) -> bool:
        """Print what the finished command printed; False if anything has changed since.

        `runs`: the runs of this command, if they are known already; they can change if plugins register further algorithms.
        """
        try:
            held = json.loads(self.file.read_text(encoding="utf-8"))
            same = held["key"] == self.key and (runs is None or held["runs"] == [str(run) for run in runs])
            same = same and all(stamp(Path(name)) == known for name, known in held["files"].items())
            shown = str(held["shown"]) if same else ""
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return False
        if shown:
            console.print(Text.from_ansi(shown), soft_wrap=True)
            console.print("all runs are finished", style="dim")
        return bool(shown)

    def keep(self, shown: str, runs: Sequence[Path], pages: Sequence[Path], opened: Opened | None = None) -> None:
        read = opened.files() if opened is not None and self.code.reads else {}
        if read is None or (self.code.files and not imported_as_found(self.code.files, self.modules)):
            return
        beside = [file for page in pages for file in page.parent.iterdir() if file.suffix in WRITTEN]
        files = [*(run / name for run in runs for name in FILES), *beside]
        with contextlib.suppress(OSError):  # only a shortcut
            stamps = read | {str(file): stamp(file) for file in files}
            held = {"key": self.key, "runs": [str(run) for run in runs], "shown": shown, "files": stamps}
            write_text(self.file, json.dumps(held))


def _plugin_code(plugins: Any) -> Code | None:
    """The code of the plugins; None if it is uncertain, or if the setting is not a list of names, which is refused elsewhere."""
    return plugin_code(plugins) if isinstance(plugins, list) and all(isinstance(name, str) for name in plugins) else None


def _data_files(folder: Any, texts: Iterable[str]) -> list[Path] | None:
    """The files that the data folder and specs such as `trace:phones.csv` name; None if it is not clear which."""
    try:
        found = [file for text in texts for file in _named_in(text)]
        for file in Path(folder).resolve().rglob("*") if isinstance(folder, str) else ():
            if file.is_symlink() or len(found) > MOST_FILES:
                return None
            found.append(file)
    except (OSError, ValueError, Doubt):
        return None
    return sorted({file for file in found if not file.is_dir()})


def _named_in(text: str) -> list[Path]:
    """All existing files that a part of the text may name: names may contain separators, or be quoted."""
    parts = re.split(r"([:,=])", text)
    if len(parts) > MOST_PARTS or "\\" in text:
        raise Doubt
    names = {"".join(parts[a : b + 1]).strip().strip('"').strip() for a in range(0, len(parts), 2) for b in range(a, len(parts), 2)}
    files = [Path(name).resolve() for name in sorted(names) if name and Path(name).exists()]
    if any(file.is_dir() for file in files) or ("/" in text and not files):
        raise Doubt
    return files


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _code() -> str:
    """A hash of this package's files: results depend on its code, and pages on its templates."""
    found, package = hashlib.sha256(), Path(__file__).parent.parent
    for file in sorted(package.rglob("*")):
        if file.is_file() and file.suffix != ".pyc":
            found.update(file.read_bytes())
    return found.hexdigest()


def _versions() -> list[Any]:
    """Values that change with the versions of Python, PyTorch and NumPy, found without importing them: results depend on the versions."""
    specs = [PathFinder.find_spec(name) for name in ("torch", "numpy")]
    return [sys.version, *(stamp(Path(spec.origin).with_name("version.py")) for spec in specs if spec is not None and spec.origin)]
