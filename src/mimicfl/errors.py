"""Errors that the user can fix, and the checks that raise them.

A `UsageError` reports a mistake in the input: its message is one sentence that says what is wrong and what to change.
The command line prints that sentence and exits with code 2; in Python it is an ordinary `ValueError`.
"""

import difflib
import math
import sys
import warnings
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


class UsageError(ValueError):
    """A mistake in the input; the message says what to change."""


class Diverged(UsageError):
    """Training produced a loss or an update that is not finite."""

    client: int | None = None  # whose update it was
    runs: dict[str, str]  # of several runs that trained together: why each of them diverged


class Paused(Exception):
    """The time limit was reached; the runs in progress are saved and can be resumed."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `did you mean ...?` if the word is close to a known one, else the list of known words."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(names)


def shown(value: Any) -> str:
    """Format a value for an error message, in at most 100 characters. Works for objects whose repr fails."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a user's __repr__ that raises, or an integer with thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:96]} ..."


def plain(value: Any) -> Any:
    """Convert an array or a tensor to a number or a list; return anything else unchanged."""
    try:
        return value.tolist()
    except Exception:  # most objects have no tolist; some tensors (sparse, meta) cannot be converted
        return value


def first_line(error: BaseException) -> str:
    """Return the first line of an error raised by torch or by the user's code; the rest rarely helps."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def one_of(what: str, value: Any, choices: Iterable[str]) -> str:
    names = list(choices)
    if not isinstance(value, str):
        raise UsageError(f"{what} must be one of {', '.join(names)}, got {shown(value)}")
    if value not in names:
        raise UsageError(f"{what} {shown(value)} is unknown; {nearest(value, names)}")
    return value


def flag(what: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{what} must be true or false, got {shown(value)}")
    return bool(value)


def _real(value: Any) -> float:
    """Convert a real number to a float (infinity if it is too large); return nan for everything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def number(what: str, value: Any, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False) -> float:
    """Check for a finite number in [low, high], or in (low, high] if `open_low`."""
    found = _real(value)
    if not math.isfinite(found):
        raise UsageError(f"{what} must be a number, got {shown(value)}")
    if found < low or found > high or (open_low and found == low):
        left = f"more than {low:g}" if open_low else f"at least {low:g}"
        bounds = left if high == math.inf else f"{left} and at most {high:g}"
        raise UsageError(f"{what} must be {bounds}, got {shown(value)}")
    return found


def unit_interval(what: str, value: Any) -> float:
    """Check for a number in [0, 1), such as a momentum factor."""
    if not 0 <= (found := number(what, value)) < 1:
        raise UsageError(f"{what} must be at least 0 and less than 1, got {shown(value)}")
    return found


def integer(what: str, value: Any, *, low: int = 1, high: int = 1_000_000_000) -> int:
    """Check for a whole number in [low, high]; the default `high` only catches typing errors."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < low:
        raise UsageError(f"{what} must be a whole number of at least {low}, got {shown(value)}")
    if int(value) > high:
        raise UsageError(f"{what} must be at most {high:,}, got {shown(int(value))}")
    return int(value)


def probability(what: str, value: Any) -> float:
    if not 0 <= (found := _real(value)) <= 1:
        raise UsageError(f"{what} is a probability and must lie in [0, 1], got {shown(value)}")
    return found


def check_callable(what: str, value: Any, such_as: str = "") -> None:
    """Raise a `UsageError` unless the value is None or callable."""
    if value is not None and not callable(value):
        raise UsageError(f"{what} must be a function{such_as and f', such as {such_as}'}, got {shown(value)}")


def warn_caller(message: str) -> None:
    """Warn with the line of the user's code that called the package, however many of its functions lie between."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
