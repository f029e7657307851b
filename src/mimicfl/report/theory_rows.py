"""Rates and diagnoses from the rows of a run. They are validated, because rows come from files."""

import math
from typing import Any

import numpy as np

from ..errors import UsageError
from ..metrics.history import History
from ..metrics.rows import Row
from ..theory.rounds import Rounds

NUMBERS = ("K", "f", "grad2", "v2", "E", "gamma", "newcomers", "sigma2", "passes", "seconds")  # columns of a diagnosis
OR_NONE = ("f_low", "L", "A1", "A2")
_REMEDY = "repeat the run in a new folder"


def diagnosed(history: History) -> list[dict[str, Any]]:
    """The diagnoses of a run, each with its round."""
    found = [{"round": row["round"], **_checked(row, history.num_clients)} for row in history.rows if "diagnosis" in row]
    for d in found:
        if d["memory"].keys() != found[0]["memory"].keys():
            raise _damaged(d["round"], "memory", d["memory"], "the entries of the first diagnosis")
    return found


def rates(history: History, K: float) -> Rounds:
    """The run's rates in units of the mean gradient, and its active sets."""
    scale = K if history.config.get("update", "sum") == "sum" else 1.0
    eta = [_rate(row, "global_lr") * scale if row["clients"] else 1.0 for row in history.rows]
    return Rounds(np.array(eta), history.active)


def local_rates(history: History) -> np.ndarray:
    """eta_L of the rounds with active clients."""
    return np.array([_rate(row, "local_lr") for row in history.rows if row["clients"]])


def _rate(row: Row, key: str) -> float:
    value = row.get(key)
    if not _is_number(value) or not 0 < value < math.inf:  # type: ignore[operator]
        raise UsageError(f"{key} of round {row['round']} must be a positive number, got {value!r}; the row is damaged: {_REMEDY}")
    return float(value)  # type: ignore[arg-type]


def _checked(row: Row, num_clients: int) -> dict[str, Any]:
    """The diagnosis of a row, after checking everything that bounds and figures need."""
    t, found = row["round"], row["diagnosis"]
    if not isinstance(found, dict):
        raise _damaged(t, "diagnosis", found, "a table")
    for key in (*NUMBERS, *OR_NONE):
        value = found.get(key)
        if not _is_number(value) and not (key in OR_NONE and value is None):
            raise _damaged(t, key, value, "a number")
    if found["K"] < 1 or (found["L"] is not None and found["L"] <= 0) or found["sigma2"] < 0:
        raise _damaged(t, "K, L and sigma2", [found["K"], found["L"], found["sigma2"]], "at least 1, above 0 and not negative")
    kappa2, memory, staleness = (found.get(key) for key in ("kappa2", "memory", "staleness"))
    if not isinstance(kappa2, list) or len(kappa2) != num_clients or not all(_is_number(value) and value >= 0 for value in kappa2):
        raise _damaged(t, "kappa2", kappa2, "a number for each client")
    if not isinstance(memory, dict) or not all(map(_is_number, memory.values())):
        raise _damaged(t, "memory", memory, "a table of numbers")
    if not isinstance(staleness, dict) or not all(_is_number(staleness.get(key)) for key in ("median", "most", "max")):
        raise _damaged(t, "staleness", staleness, "a table with median, most and max")
    return {"L_how": None} | found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _damaged(t: int, what: str, value: Any, expected: str) -> UsageError:
    return UsageError(f"the diagnosis of round {t} is damaged: {what} must be {expected}, got {str(value)[:60]!r}; {_REMEDY}")
