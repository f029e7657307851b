"""Rows as a CSV file."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..metrics.rows import Row
from .interface import RunInfo
from .tracker import Tracker, file_title, numbers


@dataclass
class CSV(Tracker):
    """Write one CSV file per run below `folder`, with the numbers of every row.

    The file's name is that of the run and an id, so runs of several comparisons can share a folder. A resumed run writes its file again,
    with all rounds.
    """

    folder: str | Path = "csv"

    @property
    def spec(self) -> str:
        return f"csv:{self.folder}"

    def connect(self, run: RunInfo, run_id: str) -> int:
        self._file = Path(self.folder) / f"{file_title(run, run_id)}.csv"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._heads, self._rows = ["round"], list[dict[str, float]]()
        self._write()
        return 0

    def log(self, rows: Sequence[Row]) -> None:
        new = [{"round": row["round"], **numbers(row)} for row in rows]
        self._rows += new
        heads = list(dict.fromkeys([*self._heads, *(key for row in new for key in row)]))
        if heads != self._heads:  # a new column, usually with the first row
            self._heads = heads
            return self._write()
        with self._file.open("a", encoding="utf-8", newline="") as file:
            return csv.DictWriter(file, self._heads, lineterminator="\n").writerows(new)

    def _write(self) -> None:
        with self._file.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._heads, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self._rows)
