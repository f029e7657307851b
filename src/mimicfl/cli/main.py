"""The command `mimicfl`: its parser, and the place where every user mistake becomes a message and exit code 2."""

import os
import sys
import warnings
from collections.abc import Sequence

from .. import __version__
from ..errors import UsageError
from ..text import without_nul
from . import interrupt
from .commands import Commands
from .console import console, notice, say
from .options import Parser
from .other_commands import add_others
from .training_commands import add_training


def parser() -> Parser:
    return _parser()[0]


def command_names() -> list[str]:
    """All commands, in the order of `mimicfl --help`."""
    return _parser()[1].names


def _parser() -> tuple[Parser, Commands]:
    top = Parser(prog="mimicfl", description="Federated learning under client dropouts.", epilog="First run: mimicfl demo")
    top.add_argument("--version", action="version", version=f"mimicfl {__version__}")
    commands = Commands(top)
    add_training(commands)
    add_others(commands)
    return top, commands


def main(arguments: Sequence[str] | None = None) -> int:
    warnings.showwarning = lambda message, *_, **__: notice(message)
    parsed = None
    try:
        output = console()
        words = [without_nul("an argument", word) for word in (sys.argv[1:] if arguments is None else arguments)]
        parsed = parser().parse_args(words or ["--help"])
        interrupt.current = parsed
        parsed.call(parsed, output)
        sys.stdout.flush()
    except (UsageError, OSError) as error:
        return _fail(str(error))
    except (MemoryError, OverflowError) as error:
        return _fail(f"not enough memory: {error or 'out of memory'}; use fewer clients, a smaller model or a smaller batch")
    except RecursionError:
        return _fail("the input is nested too deeply; use fewer nested brackets")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        say(interrupt.advice(parsed))
        return 130
    return 0


def _fail(sentence: str) -> int:
    say(sentence)
    try:
        sys.stdout.flush()
    except OSError:  # what could not be printed must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 2
