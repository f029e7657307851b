"""Finished and unfinished runs, read back from their folders."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..clients import models
from ..errors import UsageError
from ..metrics import history
from ..metrics.history import History
from ..metrics.store import RunFolder, find_runs
from ..plugins import load_plugins
from ..registry import NAMED_BY, parse
from ..settings import MADE_BY, Experiment, from_dict, with_added_later
from .build import load_data

if TYPE_CHECKING:
    import pandas

FINGERPRINT = "_fingerprint"  # how the names of such columns end


def read(path: str | Path, plugins: Sequence[str] = ()) -> History:
    """A run from its folder, finished or not. Nothing that the folder names is executed.

    Only `model()` needs the run's data, and settings that name the model. A custom model or dataset must be registered first: import its
    module, or name its file in `plugins`.
    """
    folder = RunFolder(path)
    load_plugins(plugins)
    named = folder.config.get("source") not in MADE_BY
    return dataclasses.replace(history.read(folder), template=(lambda: _model(folder)) if named else None)


def frame(*paths: str | Path) -> "pandas.DataFrame":
    """Every round of every run below these folders as one data frame (needs pandas).

    Columns before the rows' own: `run` (the folder), `algorithm`, `availability`, `seed` and every other setting in which the runs
    differ. Where Python objects differ that no setting describes (a split, a model), a column such as `split_fingerprint` is added.
    """
    import pandas

    folders = find_runs(list(paths))
    histories = [history.read(folder) for folder in folders]
    settings = [_columns(folder.config, run.fingerprint.experiment) for folder, run in zip(folders, histories, strict=True)]
    differing = [key for key in dict.fromkeys(key for own in settings for key in own) if len({own.get(key) for own in settings}) > 1]
    hidden = [key for key in differing if key.endswith(FINGERPRINT) and _explained(key, differing, settings)]
    shown = list(dict.fromkeys(["algorithm", "availability", "seed", *[key for key in differing if key not in hidden]]))
    rows = [
        {"run": str(folder.path)} | {key: own.get(key) for key in shown} | row
        for folder, own, run in zip(folders, settings, histories, strict=True)
        for row in run.rows
    ]
    return pandas.DataFrame(rows)


def _columns(config: dict[str, Any], experiment: dict[str, str]) -> dict[str, Any]:
    """A run's settings, and the fingerprints of its parts, as values that can be compared."""
    plain = {key: str(value) if isinstance(value, (list, dict)) else value for key, value in with_added_later(config).items()}
    return plain | {part.replace(" ", "_") + FINGERPRINT: value[:8] for part, value in experiment.items()}


def _explained(part: str, differing: Sequence[str], settings: Sequence[dict[str, Any]]) -> bool:
    """Do the other settings already distinguish all runs that differ in this part?"""
    words = [key for key in differing if not key.endswith(FINGERPRINT) and key != "seed"]
    seen: dict[str, Any] = {}
    return all(seen.setdefault(repr([own.get(key) for key in words]), own.get(part)) == own.get(part) for own in settings)


def settings_of(folder: RunFolder) -> Experiment:
    """The experiment a folder holds."""
    if folder.config.get("source") == "python":
        again = f"call simulate(..., out={str(folder.path)!r}) again with the same arguments"
        raise UsageError(f"{folder.path} was started from Python with objects that settings cannot describe: {again}")
    return from_dict(folder.config, str(folder.path / "config.toml"))


def resumable(folder: RunFolder, plugins: Sequence[str] = ()) -> Experiment:
    """The experiment to resume, once everything it names is registered; `plugins` replace those it was started with."""
    e = settings_of(folder)
    remedy = f"mimicfl resume {folder.path} --plugin FILE"
    # Add the stored plugins that still exist: a folder of runs may need several.
    used = [*plugins, *(own for own in e.plugins if own not in plugins and (not plugins or not own.endswith(".py") or Path(own).exists()))]
    try:
        load_plugins(used)
    except UsageError as error:
        raise UsageError(str(error) if plugins else f"{error}; if it has moved: {remedy}") from None
    check_known(e, folder, f"give the file that registers it, {remedy}")
    return dataclasses.replace(e, plugins=used)


def check_known(e: Experiment, folder: RunFolder, remedy: str, settings: Iterable[str] | None = None) -> None:
    """Refuse a run whose custom parts are not registered here. They were when it started, so the name is not misspelt."""
    for setting in NAMED_BY if settings is None else settings:
        registry = NAMED_BY[setting]
        value = getattr(e.resolved(), setting)
        name = parse(value)[0] if isinstance(value, str) else ""
        if name and name not in (*registry.factories, "auto", "local", "none"):
            raise UsageError(f"{folder.path} uses a custom {registry.kind}, {name!r}, which is not registered: {remedy}")


def _model(folder: RunFolder) -> nn.Module:
    e = settings_of(folder)
    files = f", mf.read({str(folder.path)!r}, plugins={e.plugins!r})" if e.plugins else ""
    check_known(
        e, folder, f"reading a run does not execute its plugins; import the module that registers it first{files}", ("model", "dataset")
    )
    return models.build(e.model, load_data(e), e.seed).to(getattr(torch, e.dtype))
