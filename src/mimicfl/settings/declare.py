"""How a setting is declared, and how a value is read as its type."""

import contextlib
import types
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, Union, get_args, get_origin

from ..errors import UsageError, integer, number, one_of, plain
from ..text import without_nul

ENGINES = ("auto", "plain", "native", "workers", "batched", "streams")
MOST_LANES = {"batched": 4096, "streams": 16}  # more than 16 streams gain nothing: a large model's kernels fill the GPU


def setting(
    default: Any,
    text: str,
    metavar: str = "",
    *,
    choices: Sequence[str] = (),
    check: Callable[[str, Any], Any] | None = None,
    part_of_result: bool = True,
    stored_at_default: bool = True,
) -> Any:
    """Declare a setting: command-line option, TOML key, Python argument and documentation follow from this one line.

    check              raises `UsageError` for an invalid value; `choices` does so for a list of words
    part_of_result     False for settings that determine how or where a run is trained, not its result
    stored_at_default  False for a setting added later: runs that leave it at its default keep the id they had before
    """
    metadata: dict[str, Any] = {"help": text, "metavar": metavar or "|".join(choices), "check": check, "choices": tuple(choices)}
    metadata |= {"part_of_result": part_of_result, "stored_at_default": stored_at_default}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def non_negative_integer(name: str, value: Any) -> int:
    return integer(name, value, low=0)


def non_negative(name: str, value: Any) -> float:
    return number(name, value, low=0)


def zero_or_at_least_one(name: str, value: Any) -> float:
    found = number(name, value, low=0)
    if 0 < found < 1:
        raise UsageError(f"{name} must be 0 (off) or at least 1, got {found:g}")
    return found


def batch(name: str, value: Any) -> Any:
    return value if value in ("auto", "full") else integer(name, value)


def engine_name(name: str, value: Any) -> Any:
    engine_parts(value)
    return value


def engine_parts(engine: str) -> tuple[str, int, bool]:
    """`batched:128:compiled` as name, lanes (0: chosen automatically) and whether to compile."""
    if not isinstance(engine, str):
        raise UsageError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    name, *details = engine.split(":")
    one_of("engine", name, ENGINES)
    lanes, compiled = details[0] if details else "0", details[1:]
    if details and (
        name not in MOST_LANES or not lanes.isdecimal() or not 1 <= int(lanes) <= MOST_LANES[name] or compiled not in ([], ["compiled"])
    ):
        most = " and ".join(f"{engine} up to {most}" for engine, most in MOST_LANES.items())
        raise UsageError(f"engine {engine!r} is not valid: write the number of lanes and the compiler as in batched:128:compiled ({most})")
    return name, int(lanes), bool(compiled)


def coerce(name: str, value: Any, kind: Any) -> Any:
    """Convert a value to the setting's type; text from the command line becomes a number where a number is expected."""
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if type(value).__module__ == "numpy":  # a number of NumPy, as in a loop over np.arange(5)
        value = plain(value)
    if value is None and type(None) in choices:
        return None
    if get_origin(choices[0]) is list:
        if isinstance(value, str):
            value = [part for part in value.split(",") if part]
        if not isinstance(value, (list, tuple)) or not all(isinstance(part, str) for part in value):
            raise UsageError(f"{name} must be a list of strings, got {value!r}")
        return [without_nul(name, part) for part in value]
    if isinstance(value, bool):
        raise UsageError(f"{name} cannot be {value!r}")
    if int in choices and isinstance(value, int):
        return value
    if int in choices and isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            if str not in choices:
                raise UsageError(f"{name} must be a whole number, got {value!r}") from None
    if float in choices:
        with contextlib.suppress(
            ValueError, TypeError, OverflowError
        ):  # "0.05" and 0.05 are the same rate; "geometric:..." is not a number
            return float(value)
    if str in choices and isinstance(value, str):
        return without_nul(name, value.strip())
    expected = {int: "a whole number", float: "a number", str: "a string"}[choices[0]]
    raise UsageError(f"{name} must be {expected}, got {value!r}")
