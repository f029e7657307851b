"""Plugins: Python files and modules of the user that register custom algorithms, models, datasets and so on."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from .errors import UsageError


def load_plugins(plugins: Sequence[str]) -> None:
    """Import the user's files and modules, which call `register(...)`. An edited file is imported again."""
    for name in plugins:
        file = Path(name).resolve()
        if name.endswith(".py") and not file.is_file():
            raise UsageError(f"plugin {name} does not exist; give the path of an existing .py file")
        if not name or (not name.endswith(".py") and file.exists()):
            raise UsageError(f"plugin {name!r} is neither a Python file (NAME.py) nor the name of a module")
        try:
            _import_file(file) if name.endswith(".py") else importlib.import_module(name)
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
            line = f" in line {frames[-1].lineno}" if frames else f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise UsageError(f"plugin {name!r} cannot be imported: {type(error).__name__}{line}: {error}") from error


def _import_file(file: Path) -> None:
    label = f"mimicfl_plugin_{file.stem}"
    text = file.read_bytes()
    if (known := sys.modules.get(label)) is not None and getattr(known, "__plugin__", None) == (str(file), text):
        return  # already imported, and the file has not changed since
    spec = importlib.util.spec_from_file_location(label, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[label] = importlib.util.module_from_spec(spec)
    module.__plugin__ = (str(file), text)  # type: ignore[attr-defined]
    try:
        exec(compile(text, str(file), "exec", dont_inherit=True), vars(module))  # the .pyc cache may be outdated
    except BaseException:
        del sys.modules[label]
        raise
