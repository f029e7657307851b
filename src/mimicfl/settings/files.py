"""Settings from TOML files and run folders."""

import tomllib
from pathlib import Path
from typing import Any

from ..errors import UsageError, nearest
from .experiment import ADDED_LATER, SETTINGS, Experiment

MADE_BY = {"python": "Python objects", "flower": "a Flower federation"}  # `source` of runs that were not started from settings


def device_kind(device: str) -> str:
    """`cuda:1` is of the kind `cuda`."""
    return device.partition(":")[0]


def check_kept(config: dict[str, Any], where: str) -> None:
    """Refuse settings of a run folder whose type would break a reader; other settings are only displayed."""
    kinds: dict[str, tuple[Any, str]] = dict.fromkeys(("algorithm", "availability", "dataset", "source"), (str, "a string"))
    kinds |= dict.fromkeys(("seed", "num_clients"), (int, "a whole number"))
    kinds |= {key: (str, "a string") if isinstance(SETTINGS[key].default, str) else ((int, float), "a number") for key in ADDED_LATER}
    for key, (kind, expected) in kinds.items():
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise UsageError(f"{where}: {key} must be {expected}, got {value!r}; the file is damaged or was not written by mimicfl")


def from_dict(settings: dict[str, Any], where: str = "") -> Experiment:
    """An experiment from plain settings; an unknown name is refused, and the nearest known name suggested.

    `where` names the file in error messages, if the settings come from one.
    """
    source, prefix = where or "the run", f"{where}: " if where else ""
    if settings.get("source") in tuple(MADE_BY):  # not a lookup: a damaged file may hold a list there
        made = MADE_BY[settings["source"]]
        raise UsageError(f"{source} describes a run that was started from {made}, which settings cannot describe: resume it from there")
    clean = {}
    for key, value in settings.items():
        name = key.replace("-", "_")
        if name == "grid" and isinstance(value, dict):
            raise UsageError(f"{source} has a [grid], which describes many runs: use mimicfl sweep, or remove the [grid]")
        if name not in SETTINGS:
            raise UsageError(f"{prefix}there is no setting {key!r}; {nearest(name, SETTINGS)}")
        clean[name] = value
    try:
        return Experiment(**clean)
    except UsageError as error:
        raise UsageError(f"{prefix}{error}") from None


def read_toml(file: str | Path) -> dict[str, Any]:
    """The settings in a TOML file, unchanged."""
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: too many digits or nested brackets, too
        raise UsageError(f"{file} is not valid TOML: {error}") from None


def read_settings(file: Path) -> dict[str, Any]:
    """A file's settings; paths of plugins and data are relative to the file, not to the current folder."""
    settings: dict[str, Any] = {}
    for key, value in read_toml(file).items():
        name = key.replace("-", "_")
        if name in settings:
            raise UsageError(f"{file}: {key!r} is given twice")
        settings[name] = value
    if isinstance(settings.get("plugins"), list):
        settings["plugins"] = [str(file.parent / p) if str(p).endswith(".py") else p for p in settings["plugins"]]
    if isinstance(settings.get("data_path"), str):
        settings["data_path"] = str(file.parent / settings["data_path"])
    return settings
