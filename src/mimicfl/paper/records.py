"""Finished runs as small files: what was set, what came out round by round, and on what; no weights."""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from .. import algorithms
from ..config import BESIDE_THE_POINT, Experiment, from_dict
from ..errors import UsageError
from ..files import explained, write_text
from ..metrics.environment import THEN
from ..metrics.history import History, Row
from ..metrics.store import RunFolder

FORMAT = "mimicfl-record-1"
COLUMNS = {"round": None, "active": None, "uploads": None, "bytes_up": None, "train_loss": 6, "test_loss": 6, "test_accuracy": 6}  # digits
LEFT_OUT = set(BESIDE_THE_POINT) - {"device", "engine"}  # how a run was kept, and paths of one machine
_REMEDY = "give the folder that holds the records and nothing else"
Records = dict[str, History]  # by the id of the experiment
BY_THE_CLOCK = ("0.1.0",)  # versions that let the compiler time several orders of summation on a GPU and keep the fastest


def keep(folder: RunFolder, into: Path) -> Path:
    """Write what a finished run folder holds as one record; a record that is there is replaced."""
    found = folder.load("final")
    if found is None:
        raise UsageError(f"{folder.path} is not finished: only finished runs are recorded")
    facts = found[1]
    rows = folder.rows_of(facts)
    experiment = from_dict(folder.config, str(folder.path))
    record = {
        "format": FORMAT,
        "settings": {key: value for key, value in experiment.to_dict().items() if value not in (None, []) and key not in LEFT_OUT},
        "environment": made_with(folder, facts),
        "rows": {name: [short(name, row.get(name)) for row in rows] for name in COLUMNS},
    }
    target = prepare(into) / f"{experiment.name}.json"
    write_text(target, _lines(record))
    return target


def made_with(folder: RunFolder, facts: dict[str, str]) -> dict[str, Any]:
    """Versions, hardware and engine of a finished run; the facts are those of its result."""
    return folder.environment() | {"engine": facts.get("engine", "")}


def prepare(folder: Path) -> Path:
    """The folder for records, made; better refused before the training than after it."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give a folder for the records")
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    return folder


def read_all(folder: Path) -> Records:
    """Every record in a folder."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give the folder of the records")
    found: Records = {}
    files: dict[str, Path] = {}
    try:
        listed = sorted(file for file in folder.iterdir() if file.suffix == ".json") if folder.exists() else []
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror or error}") from None
    for file in listed:
        history = read(file)
        own = from_dict(history.config).id
        if own in files:
            raise UsageError(f"{files[own]} and {file} are records of the same run: delete one of them")
        found[own], files[own] = history, file
    return found


def read(file: Path) -> History:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']!r}")
        columns = {name: list(record["rows"][name]) for name in COLUMNS}
        rows: list[Row] = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        settings, made = dict(record["settings"]), dict(record["environment"])
        if not rows or rows[-1]["test_accuracy"] is None:
            raise ValueError("it has no final accuracy")
        for row in rows:
            if (name := next((name for name, value in row.items() if not _sound(name, value)), None)) is not None:
                raise ValueError(f"its {name} of {str(row[name])[:20]} is none")
        experiment = from_dict(settings, "its settings")
        _check_whole(rows, experiment)
    except KeyError as error:
        raise UsageError(f"{file} is not a record of a run (it has no {error}): {_REMEDY}") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:  # a UsageError is a ValueError
        raise UsageError(f"{file} is not a record of a run ({error}): {_REMEDY}") from None
    return History(rows, torch.empty(0), experiment.num_clients, config=experiment.to_dict(), environment=made)


def repeats(run: History) -> bool:
    """Does this record's number come again, to the last digit, where it was made?"""
    made = run.environment
    if any(THEN in str(made.get(kind)) for kind in ("mimicfl", "torch", "gpu", "processor")):  # made in two places
        return False
    return made.get("mimicfl") not in BY_THE_CLOCK or "compiled" not in str(made.get("engine"))


def _check_whole(rows: list[Row], experiment: Experiment) -> None:
    """Every round of the run, from the first to the one that ended it."""
    if [row["round"] for row in rows] != list(range(len(rows))):
        raise ValueError("its rounds do not follow each other")
    if experiment.uploads is not None:
        cost = getattr(algorithms.make(experiment.algorithm), "uploads", 1)
        whole = 0 <= experiment.uploads - rows[-1]["uploads"] < cost or len(rows) == experiment.rounds
    else:
        whole = len(rows) == experiment.rounds
    if not whole:
        raise ValueError(f"it ends after {len(rows)} rounds and {rows[-1]['uploads']} uploads, before the run does")


def _sound(column: str, value: Any) -> bool:
    """Is this a value that a run can have?"""
    if COLUMNS[column] is None:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
    if value is None:
        return True
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return number and (column != "test_accuracy" or 0 <= value <= 1)


def short(column: str, value: Any) -> Any:
    """A value with the digits that a record keeps of it."""
    digits = COLUMNS[column]
    return float(f"{value:.{digits}g}") if digits and value is not None else value


def _lines(record: dict[str, Any]) -> str:
    """JSON with one column a line: a change is then a readable difference."""
    rows = ",\n".join(f'    "{name}": {json.dumps(values, separators=(",", ":"))}' for name, values in record["rows"].items())
    rest = json.dumps({key: value for key, value in record.items() if key != "rows"}, indent=2)
    return rest.removesuffix("\n}") + ',\n  "rows": {\n' + rows + "\n  }\n}\n"
