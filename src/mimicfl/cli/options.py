"""Every setting of an experiment as a command-line option, made from the settings themselves."""

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

from ..config import SETTINGS, Experiment, from_dict, read_settings
from ..errors import nearest
from .console import say

ALIASES = {"num_clients": "--clients"}


class Parser(argparse.ArgumentParser):
    """An argument parser that answers a misspelt option with the nearest right one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(*args, **kwargs)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Strict already here: the command's own parser knows which options are near, the one above it does not."""
        parsed, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            word = unknown[0]
            known = [option for action in self._actions for option in action.option_strings]
            self.error(f"there is no option {word}; {nearest(word, known)}" if word.startswith("-") else f"unexpected word {word!r}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        say(f"{message}\nTry: {self.prog} --help")
        sys.exit(2)


def add_settings(parser: argparse.ArgumentParser, without: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> None:
    """`--dataset`, `--rounds`, ...: none given means the file's value or the default."""
    group = parser.add_argument_group("settings (the same words in TOML)")
    for name, field in SETTINGS.items():
        if name in without or (only and name not in only):
            continue
        flags = [f"--{name.replace('_', '-')}", *([ALIASES[name]] if name in ALIASES else [])]
        default = f" (default {field.default})" if field.default not in ("auto", None) and isinstance(field.default, (str, int)) else ""
        many = name == "plugins"
        text = field.metadata["help"] + default
        if many:
            group.add_argument("--plugin", "--plugins", dest=name, action="append", default=argparse.SUPPRESS, help=text, metavar="FILE")
        else:
            group.add_argument(*flags, dest=name, default=argparse.SUPPRESS, help=text, metavar=field.metadata["metavar"])


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that stand on the command line."""
    return {name: value for name, value in vars(arguments).items() if name in SETTINGS}


def experiment(arguments: argparse.Namespace, also: tuple[str, ...] = ()) -> Experiment:
    """The TOML file, then the options: the later wins. Keys in `also` are the command's own and end up in `arguments`."""
    settings: dict[str, Any] = {}
    own = given(arguments)
    if getattr(arguments, "file", None):
        settings = read_settings(Path(arguments.file))
    for key in also:
        value = settings.pop(key, None)
        if getattr(arguments, key) is None:
            setattr(arguments, key, value)
    # A length given here replaces the one in the file, of whichever kind; likewise the local work.
    for pair in (("rounds", "uploads"), ("epochs", "steps")):
        if any(name in own for name in pair):
            for name in pair:
                settings.pop(name, None)
    if settings:
        from_dict({key: value for key, value in settings.items() if key not in own}, str(arguments.file))
    return from_dict(settings | own)
