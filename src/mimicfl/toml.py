"""Writing flat TOML; the standard library only reads it."""

import json
from typing import Any


def dumps(settings: dict[str, Any]) -> str:
    """Format settings as TOML lines. None is omitted, since TOML has no null value."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in settings.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    # A JSON string is a valid TOML basic string, except for DEL, which TOML requires to be escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
