"""`try_app`: what an app's `try_it.py` does, the whole federation in one process with the settings of the app."""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from ..errors import UsageError, integer, nearest
from ..settings import read_toml
from ..text import visible
from .app import RUN_CONFIG
from .in_process import simulate


def try_app(server: ServerApp, client: ClientApp, project: str | Path, arguments: Sequence[str]) -> int:
    """Run an app with the settings in its pyproject.toml, changed by arguments such as `num-rounds=3`; returns the exit code.

    A mistake of the user is one sentence on the error stream and exit code 2.
    """
    try:
        settings = run_config(Path(project), arguments)
        simulate(server, client, integer("num-clients", settings.get("num-clients")), settings)
    except UsageError as error:
        print(f"try_it.py: {visible(str(error))}", file=sys.stderr)
        return 2
    return 0


def run_config(project: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """The settings in `[tool.flwr.app.config]`, changed by the arguments. Like `flwr run`, it refuses names that the app does not know."""
    found: Any = read_toml(project)
    for key in ("tool", "flwr", "app", "config"):
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        raise UsageError(f"{project} has no table [tool.flwr.app.config]; add it with the settings of the app")
    known = {*found, *(name.replace("_", "-") for name in RUN_CONFIG)}
    for argument in arguments:
        for key, value in _parsed(argument).items():
            name = key if key in found else key.replace("_", "-")
            if name not in known:
                raise UsageError(f"there is no setting {key!r}; {nearest(name, known)}")
            found[name] = value
    return found


def _parsed(argument: str) -> dict[str, Any]:
    name, equals, value = argument.partition("=")
    if not equals:
        raise UsageError(f"{argument!r} is not a setting; write NAME=VALUE, such as num-rounds=3")
    try:
        return tomllib.loads(argument)
    except (ValueError, RecursionError) as error:
        quoted = f'{name}="{value}"'
        why = str(error) if '"' in value or "'" in value or "[" in value else f"text needs quotes of its own: {quoted!r}"
        raise UsageError(f"{argument!r} is not valid TOML; {why}") from None
