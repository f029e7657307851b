"""`mimicfl`: the parser of all commands, and the one place where a mistake becomes a sentence and exit code 2."""

import os
import sys
import warnings
from collections.abc import Sequence

from .._version import __version__
from ..errors import UsageError
from ..text import without_nul
from . import federation, interrupt, look, paper, theory, train
from .console import console, notice, say
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
    p.add_argument("--algorithms", nargs="+", help="algorithms by name (default: the five of the paper)", metavar="SPEC")
    p.add_argument("--seeds", help="how many (3: the seeds 0, 1, 2) or which (4,7); default 3", metavar="SEEDS")
    p.add_argument("--out", help="folder for the runs and the report (default runs/compare-...)", metavar="DIR")
    add_settings(p, without=("algorithm", "seed"))
    p.set_defaults(call=train.compare)

    p = command(
        "sweep",
        "train every combination of a grid of settings, as many runs at once as fit",
        "mimicfl sweep grid.toml --device cuda",
        "mimicfl sweep grid.toml --ray auto",
    )
    p.add_argument("file", help="settings in TOML, and a [grid] of lists to combine", metavar="FILE.toml")
    p.add_argument("--out", help="folder for the runs and the reports (default runs/FILE)", metavar="DIR")
    p.add_argument(
        "--ray", help="spread the runs over a Ray cluster: its address, 'auto', or 'local' for workers on this machine", metavar="ADDRESS"
    )
    add_settings(p, only=("device", "engine", "state_budget", "checkpoint_every", "data_path"))
    p.set_defaults(call=train.sweep)

    p = command(
        "resume",
        "go on with a stopped run, or all stopped runs of a folder, to the same end",
        "mimicfl resume runs/first",
        "mimicfl resume runs/own --plugin mine.py          (an own algorithm, registered in Python or moved since)",
    )
    p.add_argument("run", help="run folder, or a folder of runs", metavar="RUN")
    add_settings(p, only=("plugins",))
    p.set_defaults(call=train.resume)

    p = command(
        "reproduce",
        "run the paper's experiments, and keep what came out",
        "mimicfl reproduce --list",
        "mimicfl reproduce table-4-fmnist --seeds 3 --device cuda",
        "mimicfl reproduce table-4-fmnist --scale 0.1          (a quick look on a CPU)",
    )
    p.add_argument("names", nargs="*", help="experiments by name, or 'all'", metavar="NAME")
    p.add_argument("--list", action="store_true", help="list the experiments")
    p.add_argument("--status", action="store_true", help="say which runs are recorded, which are missing, and how long those take")
    p.add_argument(
        "--seeds",
        help="how many (3: the first three) or which (0,2; one alone as 2,), counted from an experiment's first; default 3",
        metavar="SEEDS",
    )
    p.add_argument("--columns", nargs="+", help="only these columns of the tables", metavar="NAME")
    p.add_argument("--algorithms", nargs="+", help="only these algorithms", metavar="NAME")
    p.add_argument("--scale", type=float, help="fewer rounds and local epochs by this factor; shown, not recorded", metavar="X")
    p.add_argument(
        "--minutes",
        type=float,
        help="stop after so many minutes, in the middle of a run if need be; the same command goes on there",
        metavar="M",
    )
    p.add_argument("--again", action="store_true", help="make recorded runs once more and compare the numbers")
    p.add_argument("--records", help="where the records are (default records/paper)", metavar="DIR")
    p.add_argument("--out", help="folder for the runs (default runs/paper)", metavar="DIR")
    add_settings(p, only=("device", "engine", "state_budget", "checkpoint_every", "data_path"))
    p.set_defaults(call=paper.run)

    p = command(
        "report",
        "table, pictures and one HTML page from runs",
        "mimicfl report runs/demo",
        "mimicfl report runs/a runs/b --out both",
        "mimicfl report --paper",
    )
    p.add_argument("runs", nargs="*", help="run folders, or folders of them", metavar="RUN")
    p.add_argument("--paper", action="store_true", help="the page about the paper, from its records")
    p.add_argument("--records", help="with --paper: where the records are (default records/paper)", metavar="DIR")
    p.add_argument("--out", help="where to write (default: the first RUN; with --paper docs/ and runs/paper/)", metavar="DIR")
    p.set_defaults(call=look.report)

    p = command("data", "list datasets, or fetch one", "mimicfl data list", "mimicfl data fetch fmnist")
    p.add_argument("action", choices=["list", "fetch"])
    p.add_argument("name", nargs="?", help="fmnist or cifar10", metavar="NAME")
    p.add_argument("--path", help="folder that holds the files already", metavar="DIR")
    p.set_defaults(call=look.data)

    p = command(
        "theory",
        "the paper's conditions and bounds beside a run",
        "mimicfl theory check runs/first",
        "mimicfl theory show runs/first --out pictures     (after a run with --diagnose every=10)",
    )
    p.add_argument("action", choices=["check", "show"], help="check: which conditions the rates satisfy; show: draw what was diagnosed")
    p.add_argument("runs", nargs="+", help="run folders, or folders that hold them", metavar="RUN")
    p.add_argument("--L", type=float, help="check: smoothness, if not to be computed", metavar="L")
    p.add_argument("--K", type=int, help="check: local steps, if not to be computed", metavar="K")
    p.add_argument("--tau-max", type=int, help="check: for any gaps up to this, not those that happened", metavar="TAU")
    p.add_argument("--nu", type=float, help="check: the proof's nu (default: the best)", metavar="NU")
    p.add_argument("--plugin", dest="plugins", action="append", help="check: Python file with a custom part of the run", metavar="FILE")
    p.add_argument("--out", help="show: folder for the pictures (default: the first run's)", metavar="DIR")
    p.set_defaults(call=theory.theory)

    p = command("bench", "time the engines on this machine", "mimicfl bench --model lenet --batch-size 16 --cohorts 3,30 --threads 2")
    p.add_argument("--model", default="lenet", help="a model by name (default lenet)", metavar="SPEC")
    p.add_argument("--batch-size", type=int, default=16, metavar="B")
    p.add_argument("--steps", type=int, default=20, help="local steps a client (default 20)", metavar="K")
    p.add_argument("--cohorts", default="3,30", help="clients a round, one or several (default 3,30)", metavar="M")
    p.add_argument("--repeats", type=int, default=7, metavar="R")
    p.add_argument("--device", default="cpu", help="cpu (default), cuda or auto", metavar="NAME")
    p.add_argument("--precision", default="fp32", help="fp32 (default), tf32 or bf16", metavar="NAME")
    p.add_argument(
        "--engines",
        help="which besides plain, e.g. native,workers or batched,compiled,streams,compiled-streams (default: all)",
        metavar="NAMES",
    )
    p.add_argument("--threads", type=int, help="threads (default: torch's)", metavar="T")
    p.set_defaults(call=look.bench)

    p = command(
        "availability",
        "draw who is there when",
        "mimicfl availability show time-varying:0.1 --clients 30 --rounds 100 --out schedule.png",
        'mimicfl availability show "label-correlated:classes=[0,1],rare=0.05"',
    )
    p.add_argument("action", choices=["show"])
    p.add_argument("pattern", help="always, bounded:20, static:0.1, time-varying:0.1, markov:0.1,0.5, cyclic:20,4, ...", metavar="SPEC")
    p.add_argument("--clients", type=int, help="default 30, of a given schedule all", metavar="N")
    p.add_argument("--rounds", type=int, help="default 100, of a given schedule all", metavar="T")
    p.add_argument("--seed", type=int, default=0, metavar="S")
    p.add_argument(
        "--dataset", default="digits", help="for label-correlated: whose labels (default digits, two shards a client)", metavar="NAME"
    )
    p.add_argument("--plugin", dest="plugins", action="append", help="Python file with an own pattern", metavar="FILE")
    p.add_argument("--out", help="also as a picture: .png, .svg or .pdf", metavar="FILE")
    p.set_defaults(call=look.availability)

    p = command("flower", "write a small app for a real federation on Flower", "mimicfl flower new my-federation")
    p.add_argument("action", choices=["new"])
    p.add_argument("folder", help="a new folder; its name becomes the app's", metavar="DIR")
    p.set_defaults(call=federation.flower)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    warnings.showwarning = lambda message, *_, **__: notice(message)
    parsed = None
    try:
        output = console()
        words = [without_nul("an argument", word) for word in (sys.argv[1:] if arguments is None else arguments)]
        parsed = parser().parse_args(words)
        interrupt.current = parsed
        parsed.call(parsed, output)
        sys.stdout.flush()
    except (UsageError, OSError) as error:
        return _fail(str(error))
    except (MemoryError, OverflowError) as error:
        return _fail(f"this is too large for this machine: {error or 'out of memory'}; use smaller numbers")
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
