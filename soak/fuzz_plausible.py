"""Checks of plausibility for the results of API calls, by type."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch

import mimicfl as mf

from .fuzz_arguments import Call


def implausible(call: Call, found: Any, again: Any, strict: bool) -> str:
    """Describe a defect of a result; empty if there is none. `again` is the result of the repeated call; `strict`: damage must not show."""
    for history in _histories(found):
        if trouble := _history(history, ended="stop" not in call.text):
            return f"implausible: {call.name}: {trouble}"
    if call.twice and any(not _same(a, b) for a, b in zip(_histories(found), _histories(again), strict=True)):
        return f"implausible: {call.name}: the repeated call gives different bits"
    if strict and not _same(found, mf.read("../templates/" + call.runs[0])):
        return "damage accepted: mf.read returns different numbers"
    return _other(call, found)


def _histories(found: Any) -> list[mf.History]:
    if isinstance(found, mf.History):
        return [found]
    return [history for group in found.values() for history in group] if isinstance(found, dict) else []


def _history(history: mf.History, ended: bool) -> str:
    if not history.rows or not bool(torch.isfinite(history.params).all()):
        return "no rows, or parameters that are not finite"
    if [row["round"] for row in history.rows] != list(range(len(history.rows))):
        return "rounds out of order"
    asked = history.config.get("rounds")
    if ended and asked and len(history.rows) != asked and not history.config.get("uploads"):
        return f"{len(history.rows)} rows for {asked} requested rounds"
    shares = [row["test_accuracy"] for row in history.rows if row["test_accuracy"] is not None] + list(history.client_accuracy)
    if not all(0 <= share <= 1 for share in shares):
        return "an accuracy outside [0, 1]"
    return "" if all(b["uploads"] >= a["uploads"] for a, b in pairwise(history.rows)) else "uploads decrease"


def _same(a: mf.History, b: mf.History) -> bool:
    rows = [[{key: value for key, value in row.items() if key != "seconds"} for row in history.rows] for history in (a, b)]
    return torch.equal(a.params, b.params) and rows[0] == rows[1]


def _other(call: Call, found: Any) -> str:
    if call.name == "schedule" and not (isinstance(found, np.ndarray) and found.dtype == bool and found.ndim == 2 and found.size):
        return "implausible: a schedule must be bool [rounds, clients]"
    if call.name == "partition":
        taken = np.concatenate(found)
        if len(np.unique(taken)) != len(taken) or min(map(len, found)) == 0:
            return "implausible: a sample at two clients, or a client without samples"
    if call.name == "rate":
        values = [float(found(t, 2)) for t in range(3)]
        if not all(0 < value < float("inf") for value in values):
            return f"implausible: rates {values}"
    return ""
