"""The rows of a run in `rows.jsonl`: one line per round, each with a checksum of itself and of all lines before it."""

import json
import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import explained, flush, is_scratch, write_text

MOST_CLIENTS = 10**9  # a larger client id means a damaged row
CHECKED = re.compile(rb', "crc": "([0-9a-f]{8})"}$')  # the end of a line
FROM_START = "delete checkpoint.safetensors and final.safetensors to repeat the run from the start"
Row = dict[str, Any]
TOTALS = ("uploads", "vectors_up", "vectors_down", "bytes_up", "bytes_down")  # columns that count from the first round
# Columns that only some rows have, and those that a data frame of several runs adds.
RESERVED = {"stopped", "distance", "diagnosis", "available", "selected", "missing", "virtual_seconds", "staleness"}
RESERVED |= {"run", "algorithm", "availability", "seed"}


class RowsFile:
    """Appends rows and reads them. `facts` is the metadata of a checkpoint or result: its number of rounds and the checksum of its rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.crc = 0  # checksum of the rows written so far
        self._waiting: list[str] = []  # lines of a scratch folder, which are written with the next checkpoint

    def read(self, facts: Mapping[str, str]) -> list[Row]:
        """All rows up to the first incomplete line, checked against the facts."""
        count, found = number_of_rounds(facts), self._read()
        if len(found) < count:
            raise UsageError(f"{self.path} is damaged: {len(found)} valid rows, but the run had reached round {count}; {FROM_START}")
        if count and facts.get("rows", found[count - 1][1]) != found[count - 1][1]:
            raise UsageError(f"{self.path} does not belong to this run: its rows come from a different run; {FROM_START}")
        return [row for row, _ in found]

    def _read(self) -> list[tuple[Row, str]]:
        """Every valid row with its checksum, which is empty for rows of earlier versions."""
        found: list[tuple[Row, str]] = []
        crc = 0
        for line in self.path.read_bytes().split(b"\n")[:-1] if self.path.is_file() else []:
            end = CHECKED.search(line)
            body = line[: end.start()] + b"}" if end else line
            crc = zlib.crc32(body, crc)
            row = _parsed(body)
            checked = end is not None and end[1].decode() == f"{crc:08x}"
            legacy = end is None and all(not known for _, known in found)
            if row is None or row["round"] != len(found) or not (checked or legacy):
                break
            found.append((row, f"{crc:08x}" if end else ""))
        return found

    def append(self, row: Row) -> None:
        if is_scratch():  # rows beyond the checkpoint would be repeated anyway
            self._waiting.append(self._line(row))
        else:
            self._write(self._line(row))

    def replace(self, rows: list[Row]) -> None:
        """Replace the content of the file by these rows, atomically."""
        self.crc, self._waiting = 0, []
        write_text(self.path, "".join(map(self._line, rows)))

    def flush(self) -> None:
        """Make sure that all rows are on disk."""
        if self._waiting:
            lines, self._waiting = "".join(self._waiting), []
            self._write(lines)
        if self.path.is_file():
            with explained(self.path):
                flush(self.path)

    def _write(self, lines: str) -> None:
        with explained(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(lines)  # reopened for each row: thousands of runs may be active at once, too many open files

    def _line(self, row: Row) -> str:
        """A row as a line of the file, with the checksum of this row and all rows before it."""
        text = json.dumps(row, allow_nan=False)
        self.crc = zlib.crc32(text.encode(), self.crc)
        return f'{text[:-1]}, "crc": "{self.crc:08x}"}}\n'


def number_of_rounds(facts: Mapping[str, str]) -> int:
    """The number of rounds that a checkpoint or result includes."""
    round_ = facts.get("round", "0")
    if not round_.isdecimal():
        raise UsageError(f"the round of a checkpoint must be a whole number, got {round_!r}; the file is damaged: {FROM_START}")
    return int(round_)


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return None
    return row if _is_row(row) else None


def _reject_constant(word: str) -> None:
    raise ValueError(f"{word} is not a finite number")


def _is_row(row: Any) -> bool:
    """Whether a parsed line has all columns that readers rely on, with valid values."""
    if not isinstance(row, dict) or not isinstance(row.get("clients"), list):
        return False
    counts = all(isinstance(row.get(key), int) for key in ("round", "active", *TOTALS))
    values = [row.get(key) for key in ("test_accuracy", "test_loss", "train_loss", "distance")]
    finite = all(value is None or (isinstance(value, float) and math.isfinite(value)) for value in values)
    return counts and finite and all(isinstance(client, int) and 0 <= client < MOST_CLIENTS for client in row["clients"])
