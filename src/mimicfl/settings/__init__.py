"""Settings: declared once, for the command line, TOML, Python and the documentation."""

from .declare import coerce, engine_parts
from .experiment import (
    ADDED_LATER,
    NOT_IN_RESULT,
    SETTINGS,
    USUAL,
    Experiment,
    arguments_of,
    check,
    defaults,
    help_of,
    settings_of,
    with_added_later,
)
from .files import MADE_BY, check_kept, device_kind, from_dict, read_settings, read_toml

__all__ = [
    "ADDED_LATER",
    "MADE_BY",
    "NOT_IN_RESULT",
    "SETTINGS",
    "USUAL",
    "Experiment",
    "arguments_of",
    "check",
    "check_kept",
    "coerce",
    "defaults",
    "device_kind",
    "engine_parts",
    "from_dict",
    "help_of",
    "read_settings",
    "read_toml",
    "settings_of",
    "with_added_later",
]
