"""Every setting of an experiment as a command-line option, made from the settings themselves."""

import argparse
import functools
import importlib
import sys
import textwrap
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from ..errors import nearest
from ..settings import SETTINGS, Experiment, from_dict, help_of, read_settings
from .console import say

ALIASES = {"num_clients": "--clients"}


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps help between words only: a name such as `label-correlated` stays on one line."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Help(argparse.Action):
    """`--help`; after `--plugin FILE` it lists what the file registers as well."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
        if plugins := getattr(namespace, "plugins", None):
            importlib.import_module("mimicfl.plugins").load_plugins(plugins)
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest option or command for a misspelt one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"formatter_class": Formatter, "allow_abbrev": False, "add_help": False}
        super().__init__(*args, **kwargs)
        self.add_argument("-h", "--help", action=Help, nargs=0, default=argparse.SUPPRESS, help="show this help message and exit")
        self.later: dict[str, Callable[[], str]] = {}

    def explain(self, name: str, text: Callable[[], str]) -> None:
        """Help for an argument that lists registered names. It is made when it is shown: the names come with PyTorch's import."""
        self.later[name] = text

    def format_help(self) -> str:
        if self.later:
            importlib.import_module("mimicfl._public")  # registers all names
        for action in self._actions:
            if action.dest in self.later:
                action.help = self.later[action.dest]()
        return super().format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Suggest the nearest choice for an invalid word."""
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            hint = nearest(str(value), known) if len(known) > 1 else f"use {known[0]!r}"
            raise argparse.ArgumentError(None, f"{(action.option_strings or [action.dest])[-1]} {value!r} is unknown; {hint}")

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse unknown options here: only the command's own parser knows which options are similar."""
        parsed, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            word = unknown[0]
            known = [option for action in self._actions for option in action.option_strings]
            self.error(f"there is no option {word}; {nearest(word, known)}" if word.startswith("-") else f"unexpected word {word!r}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        for action in self._actions:
            if message == f"the following arguments are required: {action.dest}" and action.choices:
                message += f" ({', '.join(map(str, action.choices))})"
        say(f"{message}\nTry: {self.prog} --help")
        sys.exit(2)


def add_settings(parser: Parser, without: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> None:
    """Add `--dataset`, `--rounds`, ...; an option that is not given keeps the value of the file, or the default."""
    group = parser.add_argument_group("settings (same names in TOML)")
    for name, field in SETTINGS.items():
        if name in without or (only and name not in only):
            continue
        flags = [f"--{name.replace('_', '-')}", *([ALIASES[name]] if name in ALIASES else [])]
        parser.explain(name, functools.partial(help_of, name))
        if name == "plugins":
            group.add_argument("--plugin", "--plugins", dest=name, action="append", default=argparse.SUPPRESS, metavar="FILE")
        else:
            group.add_argument(*flags, dest=name, default=argparse.SUPPRESS, metavar=field.metadata["metavar"])


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings given on the command line."""
    return {name: value for name, value in vars(arguments).items() if name in SETTINGS}


def experiment(arguments: argparse.Namespace, also: tuple[str, ...] = ()) -> Experiment:
    """The settings of the TOML file, overridden by options. Keys in `also` belong to the command and are moved into `arguments`."""
    own = given(arguments)
    settings = in_file(arguments, also)
    if settings:
        from_dict({key: value for key, value in settings.items() if key not in own}, str(arguments.file))
    return from_dict(settings | own)


def in_file(arguments: argparse.Namespace, also: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings of the TOML file that no option replaces; keys in `also` as in `experiment`."""
    settings = read_settings(Path(arguments.file)) if getattr(arguments, "file", None) else {}
    for key in also:
        value = settings.pop(key, None)
        if getattr(arguments, key) is None:
            setattr(arguments, key, value)
    for key in replaced_by(given(arguments)):
        settings.pop(key, None)
    return settings


def replaced_by(own: Collection[str]) -> set[str]:
    """Rounds or uploads given as an option replace either of them in a file; likewise epochs and steps."""
    return {name for pair in (("rounds", "uploads"), ("epochs", "steps")) if set(pair) & set(own) for name in pair}
