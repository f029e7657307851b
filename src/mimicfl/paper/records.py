"""Records of finished runs: small files with the settings, the results per round and the environment, without weights."""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from .. import algorithms
from ..errors import UsageError
from ..files import explained, make_folder, write_text
from ..metrics.environment import THEN
from ..metrics.history import History
from ..metrics.history import read as read_run
from ..metrics.rows import Row
from ..metrics.store import RunFolder
from ..settings import NOT_IN_RESULT, Experiment, from_dict

FORMAT = "mimicfl-record-1"
COLUMNS = {"round": None, "active": None, "uploads": None, "bytes_up": None, "train_loss": 6, "test_loss": 6, "test_accuracy": 6}  # digits
LEFT_OUT = set(NOT_IN_RESULT) - {"device", "engine"}  # storage options, and paths that only exist on one machine
_REMEDY = "give a folder that holds only records"
Records = dict[str, History]  # by the id of the experiment
AUTOTUNED_VERSIONS = ("0.1.0",)  # versions in which the compiler timed several orders of summation on a GPU and kept the fastest


def keep(folder: RunFolder, into: Path) -> Path:
    """Write a finished run folder as one record, replacing an existing record of the run."""
    if not folder.finished:
        raise UsageError(f"{folder.path} is not finished; only finished runs can be recorded")
    run = read_run(folder)
    experiment = from_dict(folder.config, str(folder.path))
    record = {
        "format": FORMAT,
        "settings": {key: value for key, value in experiment.to_dict().items() if value not in (None, []) and key not in LEFT_OUT},
        "environment": run.environment,
        "rows": {name: [short(name, row.get(name)) for row in run.rows] for name in COLUMNS},
    }
    target = prepare(into) / f"{experiment.name}.json"
    write_text(target, _lines(record))
    return target


def prepare(folder: Path) -> Path:
    """Create the folder for records and check that it is writable, before any training."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; give a folder for the records")
    with explained(make_folder(folder)), tempfile.TemporaryFile(dir=folder):
        pass
    return folder


def read_all(folder: Path) -> Records:
    """Read every record in a folder, by the id of its experiment."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; give the folder of the records")
    found: Records = {}
    files: dict[str, Path] = {}
    try:
        listed = sorted(file for file in folder.iterdir() if file.suffix == ".json") if folder.exists() else []
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror or error}") from None
    for file in listed:
        history = read(file)
        key = from_dict(history.config).id
        if key in files:
            raise UsageError(f"{files[key]} and {file} are records of the same run; delete one of them")
        found[key], files[key] = history, file
    return found


def read(file: Path) -> History:
    """Read one record; raises `UsageError` if it is not a complete record of a run."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']!r}, expected {FORMAT!r}")
        columns = {name: list(record["rows"][name]) for name in COLUMNS}
        rows: list[Row] = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        settings, made = dict(record["settings"]), dict(record["environment"])
        if not rows or rows[-1]["test_accuracy"] is None:
            raise ValueError("it has no final accuracy")
        for row in rows:
            if (name := next((name for name, value in row.items() if not _is_valid(name, value)), None)) is not None:
                raise ValueError(f"its {name} has the invalid value {str(row[name])[:20]}")
        experiment = from_dict(settings, "its settings")
        _check_complete(rows, experiment)
    except KeyError as error:
        raise UsageError(f"{file} is not a record of a run (it has no {error}); {_REMEDY}") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:  # a UsageError is a ValueError
        raise UsageError(f"{file} is not a record of a run ({error}); {_REMEDY}") from None
    return History(rows, torch.empty(0), experiment.num_clients, config=experiment.to_dict(), environment=made)


def repeats(run: History) -> bool:
    """Whether repeating the run in its recorded environment gives identical numbers."""
    made = run.environment
    if any(THEN in str(made.get(kind)) for kind in ("mimicfl", "torch", "gpu", "processor")):  # made in two environments
        return False
    return made.get("mimicfl") not in AUTOTUNED_VERSIONS or "compiled" not in str(made.get("engine"))


def _check_complete(rows: list[Row], experiment: Experiment) -> None:
    """Raise `ValueError` unless the rows are all rounds of the run, in order."""
    if [row["round"] for row in rows] != list(range(len(rows))):
        raise ValueError("its rounds are not consecutive from 0")
    if experiment.uploads is not None:
        cost = algorithms.trait(algorithms.make(experiment.algorithm), "uploads")
        complete = 0 <= experiment.uploads - rows[-1]["uploads"] < cost or len(rows) == experiment.rounds
    else:
        complete = len(rows) == experiment.rounds
    if not complete:
        raise ValueError(f"it is incomplete: it ends after {len(rows)} rounds and {rows[-1]['uploads']} uploads")


def _is_valid(column: str, value: Any) -> bool:
    """Whether a run can have this value in this column."""
    if COLUMNS[column] is None:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
    if value is None:
        return True
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return number and (column != "test_accuracy" or 0 <= value <= 1)


def short(column: str, value: Any) -> Any:
    """Round a value to the digits that a record stores."""
    digits = COLUMNS[column]
    return float(f"{value:.{digits}g}") if digits and value is not None else value


def _lines(record: dict[str, Any]) -> str:
    """JSON with one column per line, so that diffs are readable."""
    rows = ",\n".join(f'    "{name}": {json.dumps(values, separators=(",", ":"))}' for name, values in record["rows"].items())
    rest = json.dumps({key: value for key, value in record.items() if key != "rows"}, indent=2)
    return rest.removesuffix("\n}") + ',\n  "rows": {\n' + rows + "\n  }\n}\n"
