"""Read and write traces: our neutral CSV or Parquet, FLASH's raw and processed JSON, and FedScale's pickle.

The neutral format has one row per interval, `client,start,end,period`, in seconds from the start of the trace. A device that is never
available has one row with empty start and end. The period is the length of the device's trace, the same in all its rows. In a CSV file, #
begins a comment; a name with #, a comma or a quotation mark is quoted.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UsageError, one_of, shown
from ...files import replacing
from .foreign import RULES, from_fedscale, from_flash, from_processed, is_processed
from .intervals import Trace
from .plain_data import read_plain_pickle

HEADER = "client,start,end,period"
FORMATS = ("auto", "neutral", "flash", "flash-processed", "fedscale")


def read_trace(file: str | Path, form: str = "auto", rule: str = "locked") -> Trace:
    """Read a trace. `rule` says when a device of a raw FLASH trace is available.

    locked     locked, on Wi-Fi and charging: FLASH's own rule
    idle       screen off or locked, on Wi-Fi and charging
    charging   charging
    """
    path = Path(file)
    one_of("format", form, FORMATS), one_of("rule", rule, RULES)
    try:
        kind = _kind(path) if form == "auto" else form
        if kind == "fedscale":
            return from_fedscale(read_plain_pickle(path.read_bytes(), str(path)), str(path))
        if kind == "neutral":
            return _parquet(path) if path.suffix == ".parquet" else _csv(path)
        data = json.loads(path.read_text(encoding="utf-8-sig"))
        return from_processed(data, str(path)) if kind == "flash-processed" or is_processed(data) else from_flash(data, rule, str(path))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read a trace from {path}: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from None


def _kind(path: Path) -> str:
    if path.suffix in (".csv", ".parquet"):
        return "neutral"
    if path.suffix in (".pkl", ".pickle") or _begins(path, b"\x80"):
        return "fedscale"
    return "flash" if path.suffix == ".json" or _begins(path, b"{") else "neutral" if path.suffix == ".txt" else "fedscale"


def _begins(path: Path, with_: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(with_)


# -- the neutral format -----------------------------------------------------------------------------------------------


Piece = tuple[np.ndarray, Sequence[Any], np.ndarray, np.ndarray, np.ndarray]  # number of the name per row, names, start, end, period


def _csv(path: Path) -> Trace:
    with path.open(encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
        header = file.readline().strip().replace(" ", "")
        if header != HEADER:
            raise UsageError(f"{path} must begin with the line {HEADER}, got {shown(header)}")
        try:
            return _assembled(_csv_pieces(file), str(path))
        except (ValueError, TypeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{path}: every line must be {HEADER} with times in seconds: {error}") from None


def _csv_pieces(file: Any) -> Iterator[Piece]:
    try:
        import pandas
    except ImportError:
        yield _by_hand(file)
        return
    kinds = {"client": "string", "start": "float64", "end": "float64", "period": "float64"}
    empty = {"client": [], "start": [""], "end": [""], "period": [""]}  # a device may be called NA
    columns: dict[str, Any] = {"names": list(kinds), "dtype": kinds, "na_values": empty, "keep_default_na": False}
    for piece in pandas.read_csv(file, **columns, chunksize=1_000_000, comment="#"):
        if type(piece.index) is not pandas.RangeIndex:  # pandas takes what precedes the last four columns for an index
            raise ValueError("there are more than four columns")
        codes, names = pandas.factorize(piece["client"])
        yield codes, names, *(piece[key].to_numpy() for key in ("start", "end", "period"))


def _by_hand(file: Any) -> Piece:
    """Without pandas, which is optional; slower, and only for small traces."""
    rows = list(csv.reader(line for line in file if line.strip() and not line.startswith("#")))
    if wrong := [row for row in rows if len(row) != len(HEADER.split(","))]:
        raise ValueError(f"there is a line with {len(wrong[0])} columns")
    numbers: dict[str, int] = {}
    codes = np.array([numbers.setdefault(row[0], len(numbers)) for row in rows], dtype=int)
    values = np.array([[float(cell) if cell.strip() else np.nan for cell in row[1:]] for row in rows]).reshape(-1, 3)
    return codes, list(numbers), values[:, 0], values[:, 1], values[:, 2]


def _parquet(path: Path) -> Trace:
    pyarrow = _pyarrow(path)

    def pieces() -> Iterator[Piece]:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1_000_000, columns=HEADER.split(",")):
            names = batch.column("client").cast(pyarrow.string()).dictionary_encode()
            columns = [batch.column(key).cast(pyarrow.float64()).to_numpy(zero_copy_only=False) for key in ("start", "end", "period")]
            yield names.indices.to_numpy(), names.dictionary.to_pylist(), *columns

    try:
        return _assembled(pieces(), str(path))
    except (pyarrow.ArrowException, KeyError) as error:
        raise UsageError(f"cannot read a trace from {path}: {str(error).splitlines()[0]}") from None


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"{path}: Parquet needs pyarrow: pip install 'mimicfl[parquet]', or use a .csv file") from None
    return pyarrow


def _assembled(pieces: Iterable[Piece], where: str) -> Trace:
    """In pieces, since a number per row needs less memory than a name and a period."""
    numbers: dict[str, int] = {}
    columns: tuple[list[np.ndarray], ...] = ([], [], [])  # device, start and end of the pieces
    period = np.empty(0)
    for codes, names, start, end, given in pieces:
        known = np.array([numbers.setdefault(str(name), len(numbers)) for name in names], dtype=np.int32)
        device = known[codes]
        new = np.full(len(numbers), np.nan)
        new[: len(period)] = period
        new[device[np.isnan(new[device])]] = given[np.isnan(new[device])]
        period = new
        if (period[device] != given).any():  # also if a period is missing
            raise UsageError(f"{where}: every row must give its client's period, the same in all rows of a client")
        kept = ~(np.isnan(start) & np.isnan(end))
        for column, values in zip(columns, (device, start, end), strict=True):
            column.append(values[kept])
    return Trace.of(list(numbers), _joined(columns[0]), _joined(columns[1]), _joined(columns[2]), period, where)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """The parts as one array; the list is emptied, so that a large trace is not in memory twice."""
    joined = np.concatenate(parts) if parts else np.empty(0)
    parts.clear()
    return joined


def write_trace(trace: Trace, file: str | Path) -> None:
    """Write a trace in the neutral format; the ending .csv or .parquet says how."""
    path = Path(file)
    one_of("the ending of the new trace", path.suffix, [".csv", ".parquet"])
    empty = np.flatnonzero(np.diff(trace.offsets) == 0)
    before = trace.offsets[empty]  # every device in its place: a run draws devices by their numbers
    device = np.insert(trace.device, before, empty)
    columns = {"start": np.insert(trace.start, before, np.nan), "end": np.insert(trace.end, before, np.nan)}
    columns["period"] = trace.period[device]
    with replacing(path) as partial:
        if path.suffix == ".parquet":
            _write_parquet(_pyarrow(path), partial, trace.names, device, columns)
        else:
            _write_csv(partial, trace.names, device, columns)


def _write_parquet(pyarrow: Any, path: Path, names: list[str], device: np.ndarray, columns: dict[str, np.ndarray]) -> None:
    clients = pyarrow.DictionaryArray.from_arrays(pyarrow.array(device.astype(np.int32)), pyarrow.array(names))
    table = pyarrow.table({"client": clients, **{key: pyarrow.array(value, from_pandas=True) for key, value in columns.items()}})
    pyarrow.parquet.write_table(table, path)


def _write_csv(path: Path, names: list[str], device: np.ndarray, columns: dict[str, np.ndarray]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(HEADER + "\n")
        quoted = [_quoted(name) for name in names]
        for i, start, end, period in zip(device.tolist(), *(columns[key].tolist() for key in ("start", "end", "period")), strict=True):
            times = f"{_exact(start)},{_exact(end)}" if start == start else ","
            file.write(f"{quoted[i]},{times},{_exact(period)}\n")


def _quoted(name: str) -> str:
    """The name of a device as it is written in a CSV file."""
    return '"' + name.replace('"', '""') + '"' if any(each in name for each in ',"#\r\n') or name != name.strip() or not name else name


def _exact(seconds: float) -> str:
    """A number that is read as the same: a time next to the start of a round must not move across it."""
    short = f"{seconds:.10g}"
    return short if float(short) == seconds else repr(seconds)
