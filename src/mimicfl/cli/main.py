"""`mimicfl`: the parser of all commands, and the one place where a mistake becomes a sentence and exit code 2."""

import os
import sys
import warnings
from collections.abc import Sequence

from rich.console import Console

from .._version import __version__
from ..errors import UsageError
from . import look, train
from .options import Parser, add_settings


def parser() -> Parser:
    top = Parser(prog="mimicfl", description="Federated learning when clients drop out.", epilog="First run: mimicfl demo")
    top.add_argument("--version", action="version", version=f"mimicfl {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, about: str, *examples: str) -> Parser:
        shown = "\n".join(f"  {example}" for example in examples)
        return commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".", epilog=f"example:\n{shown}")

    p = command("demo", "five algorithms under heavy dropouts on embedded data, in under two minutes", "mimicfl demo")
    p.add_argument("--out", help="folder for the runs and the report (default runs/demo)", metavar="DIR")
    p.set_defaults(call=train.demo)

    p = command(
        "run",
        "train one algorithm",
        "mimicfl run --dataset digits --algorithm mimic --availability time-varying:0.3 --rounds 60 --seed 3 --out runs/first",
        "mimicfl run experiment.toml --rounds 50",
    )
    p.add_argument("file", nargs="?", help="settings in TOML; options given here win", metavar="FILE.toml")
    p.add_argument("--out", help="run folder (default runs/...); an unfinished run there goes on", metavar="DIR")
    add_settings(p)
    p.set_defaults(call=train.run)

    p = command(
        "compare",
        "train several algorithms and seeds on the same splits, availability and initial models",
        "mimicfl compare --algorithms fedavg mifa mimic --seeds 3 --availability bounded:50",
        "mimicfl compare experiment.toml --algorithms fedprox:mu=0.01 fedprox:mu=0.1 --seeds 4,7",
    )
    p.add_argument("file", nargs="?", help="settings in TOML; options given here win", metavar="FILE.toml")
    p.add_argument("--algorithms", nargs="+", help="algorithms by name (default: all five)", metavar="SPEC")
    p.add_argument("--seeds", default="3", help="how many (3: the seeds 0, 1, 2) or which (4,7)", metavar="SEEDS")
    p.add_argument("--out", help="folder for the runs and the report (default runs/compare-...)", metavar="DIR")
    add_settings(p, without=("algorithm", "seed"))
    p.set_defaults(call=train.compare)

    p = command("resume", "go on with a stopped run, to the same end", "mimicfl resume runs/first")
    p.add_argument("run", help="run folder", metavar="RUN")
    p.set_defaults(call=train.resume)

    p = command(
        "report", "table, pictures and one HTML page from runs", "mimicfl report runs/demo", "mimicfl report runs/a runs/b --out both"
    )
    p.add_argument("runs", nargs="+", help="run folders, or folders of them", metavar="RUN")
    p.add_argument("--out", help="where to write (default: the first RUN)", metavar="DIR")
    p.set_defaults(call=look.report)

    p = command("data", "list datasets, or fetch one", "mimicfl data list", "mimicfl data fetch fmnist")
    p.add_argument("action", choices=["list", "fetch"])
    p.add_argument("name", nargs="?", help="fmnist or cifar10", metavar="NAME")
    p.add_argument("--path", help="folder that holds the files already", metavar="DIR")
    p.set_defaults(call=look.data)

    p = command(
        "availability",
        "draw who is there when",
        "mimicfl availability show time-varying:0.1 --clients 30 --rounds 100 --out schedule.png",
        'mimicfl availability show "label-correlated:classes=[0,1],rare=0.05"',
    )
    p.add_argument("action", choices=["show"])
    p.add_argument("pattern", help="always, bounded:20, static:0.1, time-varying:0.1, markov:0.1,0.5, cyclic:20,4, ...", metavar="SPEC")
    p.add_argument("--clients", type=int, default=30, metavar="N")
    p.add_argument("--rounds", type=int, default=100, metavar="T")
    p.add_argument("--seed", type=int, default=0, metavar="S")
    p.add_argument(
        "--dataset", default="digits", help="for label-correlated: whose labels (default digits, two shards a client)", metavar="NAME"
    )
    p.add_argument("--plugin", dest="plugins", action="append", help="Python file with an own pattern", metavar="FILE")
    p.add_argument("--out", help="also as a picture: .png, .svg or .pdf", metavar="FILE")
    p.set_defaults(call=look.availability, file=None)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    console = Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "120")))
    warnings.showwarning = lambda message, *_, **__: print(f"mimicfl: notice: {message}", file=sys.stderr)
    try:
        parsed = parser().parse_args(arguments)
        parsed.call(parsed, console)
    except UsageError as error:
        print(f"mimicfl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmimicfl: stopped; go on with 'mimicfl resume RUN', or the same command again", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0
