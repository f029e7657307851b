"""A schedule given as a matrix or a file."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import UsageError, shown
from .patterns import Pattern, register


@register("explicit")
@dataclass(frozen=True, eq=False)
class Explicit(Pattern):
    """A given schedule: a bool (or 0/1) array [rounds, clients], or a file (.npy, .json, .csv, .txt) that holds one."""

    matrix: Any = field(default=None, repr=False)
    reads_file: ClassVar[bool] = True  # in settings, where help shows it as `explicit:FILE`
    spec_hint: ClassVar[str] = "settings name a schedule by its file, as in 'explicit:schedule.npy'; simulate also takes the array"

    def __post_init__(self) -> None:
        source = self.matrix
        if source is None:
            raise UsageError("explicit availability needs a matrix or a file, as in explicit:schedule.csv")
        values = _read(source) if isinstance(source, (str, Path)) else source
        try:
            values = np.asarray(values)
        except ValueError:
            raise UsageError("explicit availability: the rows differ in length; it must be rounds x clients") from None
        except Exception:  # the conversion of a custom object may raise anything
            raise UsageError(f"explicit availability must be a matrix or a file, got {shown(source)}") from None
        where = str(source) if isinstance(source, (str, Path)) else "the matrix"
        if values.ndim != 2 or values.size == 0:
            raise UsageError(f"explicit availability: {where} must be rounds x clients, got shape {values.shape}")
        if values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
            raise UsageError(f"explicit availability: {where} must contain only 0 and 1")
        object.__setattr__(self, "_values", values.astype(bool))

    @property
    def values(self) -> np.ndarray:
        return self._values  # type: ignore[attr-defined, no-any-return]

    def example_shape(self) -> tuple[int, int]:
        rounds, clients = self.values.shape
        return rounds, clients

    def rates(self, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray | None:
        return np.asarray(self.values.mean(axis=0))

    def draw(self, rounds: int, num_clients: int, seed: int, class_counts: np.ndarray | None) -> np.ndarray:
        have_rounds, have_clients = self.values.shape
        if have_clients != num_clients:
            raise UsageError(
                f"the explicit schedule has {have_clients} clients but {num_clients} are required; "
                f"use {have_clients} clients or a schedule with {num_clients} columns"
            )
        if have_rounds < rounds:
            raise UsageError(
                f"the explicit schedule has {have_rounds} rounds but {rounds} are required; lower rounds or give a longer schedule"
            )
        return self.values[:rounds]


def _read(source: str | Path) -> Any:
    file = Path(source)
    try:
        if file.suffix == ".npy":
            return np.asarray(np.load(file, allow_pickle=False))
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".json":
            return json.loads(text)
        rows = [line.replace(",", " ").split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        return [[float(cell) for cell in row] for row in rows]
    except (OSError, EOFError, ValueError, RecursionError, MemoryError) as error:
        header = "; .csv and .txt files must contain only numbers, and header lines begin with #" if "to float" in str(error) else ""
        raise UsageError(f"cannot read a schedule from {file}: {error}{header}") from None
