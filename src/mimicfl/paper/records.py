"""Finished runs as small files: what was set, what came out round by round, and on what; no weights."""

import json
from pathlib import Path
from typing import Any

import torch

from ..config import BESIDE_THE_POINT, from_dict
from ..errors import UsageError
from ..files import explained, write_text
from ..metrics.history import History, Row
from ..metrics.store import RunFolder

FORMAT = "mimicfl-record-1"
COLUMNS = {"round": None, "active": None, "uploads": None, "bytes_up": None, "train_loss": 6, "test_loss": 6, "test_accuracy": 6}  # digits
LEFT_OUT = set(BESIDE_THE_POINT) - {"device", "engine"}  # how a run was kept, and paths of one machine
Records = dict[str, History]  # by the id of the experiment


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
        "environment": folder.environment() | {"engine": facts.get("engine", "")},
        "rows": {name: [short(name, row.get(name)) for row in rows] for name in COLUMNS},
    }
    target = prepare(into) / f"{experiment.name}.json"
    write_text(target, _lines(record))
    return target


def prepare(folder: Path) -> Path:
    """The folder for records, made; better refused before the training than after it."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give a folder for the records")
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_all(folder: Path) -> Records:
    """Every record in a folder."""
    return {from_dict(h.config).id: h for h in map(read, sorted(folder.glob("*.json")))}


def read(file: Path) -> History:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']!r}")
        columns = {name: list(record["rows"][name]) for name in COLUMNS}
        rows: list[Row] = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        settings, made = dict(record["settings"]), dict(record["environment"])
        if not rows or not all(isinstance(row["round"], int) and isinstance(row["uploads"], int) for row in rows):
            raise ValueError("it has no whole rows")
        if not all(isinstance(row["test_accuracy"], float | None) for row in rows) or rows[-1]["test_accuracy"] is None:
            raise ValueError("it has no final accuracy")
        clients = from_dict(settings, "its settings").num_clients
    except (OSError, ValueError, KeyError, TypeError) as error:  # a UsageError is a ValueError
        raise UsageError(f"{file} is not a record of a run ({error}): give the folder that holds the records and nothing else") from None
    return History(rows, torch.empty(0), clients, config=settings, environment=made)


def short(column: str, value: Any) -> Any:
    """A value with the digits that a record keeps of it."""
    digits = COLUMNS[column]
    return float(f"{value:.{digits}g}") if digits and value is not None else value


def _lines(record: dict[str, Any]) -> str:
    """JSON with one column a line: a change is then a readable difference."""
    rows = ",\n".join(f'    "{name}": {json.dumps(values, separators=(",", ":"))}' for name, values in record["rows"].items())
    rest = json.dumps({key: value for key, value in record.items() if key != "rows"}, indent=2)
    return rest.removesuffix("\n}") + ',\n  "rows": {\n' + rows + "\n  }\n}\n"
