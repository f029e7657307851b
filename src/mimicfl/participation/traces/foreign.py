"""Traces in other formats: FLASH's raw and processed JSON, and FedScale's dictionary."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import numpy as np

from ...errors import UsageError, shown
from .intervals import DAY, Trace, merged

RULES: dict[str, Callable[[dict[str, bool]], bool]] = {
    # FLASH's own definition of a device that is ready for training.
    "locked": lambda s: s["locked"] and s["wifi"] and s["charging"],
    "idle": lambda s: (s["off"] or s["locked"]) and s["wifi"] and s["charging"],
    "charging": lambda s: s["charging"],
}
_EVENTS = {
    "battery_charged_on": ("charging", True),
    "battery_charged_off": ("charging", False),
    "wifi": ("wifi", True),
    **dict.fromkeys(("unknown", "2g", "3g", "4g", "5g"), ("wifi", False)),
    "screen_off": ("off", True),
    "screen_on": ("off", False),
    "screen_lock": ("locked", True),
    "screen_unlock": ("locked", False),
}


def is_processed(data: Any) -> bool:
    return isinstance(data, dict) and any(isinstance(each, dict) and "ready_time" in each for each in data.values())


def _entries(data: Any, needed: str, where: str) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(data, dict) or not all(isinstance(each, dict) for each in data.values()):
        raise UsageError(f"{where} is not a FLASH trace: it must be an object with one entry per device, each with {needed!r}")
    if not data:
        raise UsageError(f"{where} is empty: it must contain at least one device")
    return list(data.items())


def from_flash(data: Any, rule: str, where: str) -> Trace:
    ready, names, period, clock = RULES[rule], list[str](), list[float](), list[float]()
    device, start, end = list[int](), list[float](), list[float]()
    for name, entry in _entries(data, "messages", where):
        events = _events(entry.get("messages"), f"{where}: device {name}")
        if len(events) < 2 or events[-1][0] <= events[0][0]:
            continue  # a device without a time span
        zero = events[0][0]
        intervals = _ready(events, ready)
        device += [len(names)] * len(intervals)
        start += [a - zero for a, _ in intervals]
        end += [b - zero for _, b in intervals]
        names, period, clock = [*names, str(name)], [*period, events[-1][0] - zero], [*clock, zero % DAY]
    parts = merged(np.array(device, dtype=int), np.array(start), np.array(end))
    return Trace.of(names, *parts, np.array(period), where, np.array(clock))


def _events(messages: Any, where: str) -> list[tuple[float, str]]:
    if not isinstance(messages, str):
        raise UsageError(f"{where} has no 'messages', lines such as '2020-01-29 18:42:18\\tscreen_off'")
    found = []
    for line in messages.splitlines():
        if line.strip():
            time, _, event = line.partition("\t")
            try:
                # Local times without a zone: the difference to a fixed day, so that no clock change can shift them.
                moment = (datetime.fromisoformat(time.strip()) - datetime(2000, 1, 1)).total_seconds()
            except (ValueError, TypeError):
                raise UsageError(f"{where}: {shown(line)} must begin with a time such as 2020-01-29 18:42:18 and a tab") from None
            found.append((moment, event.strip().lower()))
    return sorted(found, key=lambda each: each[0])


def _ready(events: list[tuple[float, str]], ready: Callable[[dict[str, bool]], bool]) -> list[tuple[float, float]]:
    """The intervals in which the rule holds; every state is false until an event says otherwise."""
    state = dict.fromkeys(("charging", "wifi", "off", "locked"), False)
    intervals, since = [], None
    for time, event in events:
        if event in _EVENTS:
            key, value = _EVENTS[event]
            state[key] = value
        if ready(state) and since is None:
            since = time
        elif since is not None and not ready(state):
            intervals.append((since, time))
            since = None
    return intervals + ([(since, events[-1][0])] if since is not None else [])


def from_processed(data: Any, where: str) -> Trace:
    names, period, clock = list[str](), list[float](), list[float]()
    device, start, end = list[int](), list[float](), list[float]()
    for name, entry in _entries(data, "ready_time", where):
        first, last, ready = (entry.get(key) for key in ("trace_start", "trace_end", "ready_time"))
        if first is None or last is None:
            continue  # FLASH could not read this device
        try:
            times = np.asarray(ready or [], dtype=float).reshape(-1, 2) - float(first)
            span = float(last) - float(first)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"{where}: device {name} must have numbers in trace_start, trace_end and ready_time") from None
        device += [len(names)] * len(times)
        start += times[:, 0].tolist()
        end += times[:, 1].tolist()
        names, period, clock = [*names, str(name)], [*period, span], [*clock, float(first) % DAY]
    return Trace.of(names, np.array(device, dtype=int), np.array(start), np.array(end), np.array(period), where, np.array(clock))


def from_fedscale(data: Any, where: str) -> Trace:
    """Available from active[k] to inactive[k], modulo finish_time."""
    if not isinstance(data, dict) or not data:
        raise UsageError(f"{where} must hold one entry per device with active, inactive and finish_time, as FedScale's traces do")
    names, period = list[str](), list[float]()
    parts = list[tuple[np.ndarray, np.ndarray, np.ndarray]]()
    for name, entry in data.items():
        try:
            on, off = (np.asarray(entry[key], dtype=float).reshape(-1) for key in ("active", "inactive"))
            span = float(entry["finish_time"])
        except (TypeError, KeyError, ValueError, OverflowError):
            raise UsageError(f"{where}: device {name} must have lists of numbers 'active' and 'inactive', and 'finish_time'") from None
        if len(on) != len(off):
            raise UsageError(
                f"{where}: device {name} has {len(on)} times in 'active' but {len(off)} in 'inactive'; there must be as many of both"
            )
        parts.append((np.full(len(on), len(names)), on, np.where(on < span, np.minimum(off, span), off)))
        names.append(str(name))
        period.append(span)
    device, start, end = (np.concatenate([part[k] for part in parts]) for k in range(3))
    return Trace.of(names, device, start, end, np.array(period), where)
