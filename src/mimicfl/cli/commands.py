"""How commands are added to the parser. Their modules are imported when they are called."""

import argparse
import importlib
from collections.abc import Callable
from typing import Any

from . import interrupt
from .options import Parser


class Later:
    """A module of this package whose functions are the commands; it is imported when a command is called, and PyTorch with it."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            function = getattr(importlib.import_module(f".{self.module}", __package__), name)
            interrupt.begun = True
            return function(*given)

        return call


class Command(Parser):
    """The parser of one command, with the options that several commands share."""

    def add_dry_run(self) -> None:
        self.add_argument(
            "--dry-run", action="store_true", help="only print what would run, and estimate how long it takes and how much memory it needs"
        )

    def add_ray(self, what: str = "train the clients on a Ray cluster") -> None:
        text = f"{what}: its address, 'auto', or 'local' for workers on this machine"
        self.add_argument("--ray", default="", help=text, metavar="ADDRESS")

    def add_track(self, what: str = "send every round to a tracker") -> None:
        self.add_argument(
            "--track",
            action="append",
            default=[],
            help=f"{what}: tensorboard:DIR, wandb:PROJECT, wandb:PROJECT,offline=true, mlflow:URI or csv:DIR",
            metavar="SPEC",
        )


class Commands:
    """The commands of a parser."""

    def __init__(self, top: Parser) -> None:
        self.parsers: argparse._SubParsersAction[Command] = top.add_subparsers(
            dest="command", metavar="COMMAND", required=True, parser_class=Command
        )

    def add(self, name: str, about: str, *examples: str) -> Command:
        shown = "\n".join(f"  {example}" for example in examples)
        return self.parsers.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".", epilog=f"examples:\n{shown}")

    @property
    def names(self) -> list[str]:
        return list(self.parsers.choices)
