"""`run`, `resume`, `compare`, `demo`: the commands that train."""

import argparse
import hashlib
import json
import time
from pathlib import Path

from rich.console import Console

from .. import runner
from ..config import Experiment, from_dict
from ..errors import UsageError, whole
from ..metrics.history import History, read
from ..metrics.store import RunFolder
from ..report.report import Report, build
from ..report.summary import show, verdict
from ..report.tables import table
from .options import experiment
from .progress import Reporter

DEMO = {
    "dataset": "digits",
    "num_clients": 30,
    "partition": "shards:2",
    "availability": "label-correlated:classes=[0,1,2],rare=0.02,common=0.3",
    "uploads": 200,
}


def run(arguments: argparse.Namespace, console: Console) -> None:
    e = experiment(arguments).resolved()
    out = Path(arguments.out or Path("runs") / e.name)
    _announce(console, e, out)
    with Reporter(console) as progress:
        history = runner.run(e, out, progress)
    _finish(console, history, out)


def resume(arguments: argparse.Namespace, console: Console) -> None:
    folder = RunFolder(arguments.run)
    if folder.finished:
        history = read(folder)
        console.print(f"{arguments.run} is finished: nothing to do", highlight=False)
    else:
        console.print(f"going on in {arguments.run}", highlight=False)
        with Reporter(console) as progress:
            history = runner.resume(arguments.run, progress)
    _finish(console, history, Path(arguments.run))


def compare(arguments: argparse.Namespace, console: Console) -> None:
    e = experiment(arguments)
    runner.load_plugins(e.plugins)
    names = runner.split_specs(arguments.algorithms) if arguments.algorithms else list(runner.ALL)
    _compare(console, e, names, seed_list(arguments.seeds), arguments.out)


def demo(arguments: argparse.Namespace, console: Console) -> None:
    console.print(
        "Handwritten digits on 30 clients with two classes each. Who holds a 0, 1 or 2 answers in 2 % of the rounds, the others in 30 %."
    )
    _compare(console, from_dict(DEMO), list(runner.ALL), [0, 1, 2], arguments.out or "runs/demo")


def _compare(console: Console, e: Experiment, names: list[str], seeds: list[int], out: str | None) -> None:
    began = time.monotonic()
    target = Path(out or Path("runs") / f"compare-{_digest(e, names, seeds)}")
    console.print(f"{len(names)} algorithms x {len(seeds)} seeds into {target}", highlight=False)
    with Reporter(console, runs=len(names) * len(seeds)) as progress:
        runner.compare(e, names, seeds, target, progress)
    report = build([target / runner.folder_name(a, s) for a in names for s in seeds], target)
    print_report(console, report)
    console.print(f"{time.monotonic() - began:.0f} s", style="dim", highlight=False)


def print_report(console: Console, report: Report) -> None:
    console.print()
    console.print(table(report.groups))
    console.print()
    console.print(verdict(report.groups), highlight=False)
    console.print(f"report   {report.page}", highlight=False, soft_wrap=True)
    console.print(f"pictures {', '.join(str(p) for p in report.pictures)}", highlight=False, soft_wrap=True)


def seed_list(text: str) -> list[int]:
    """`3` is the seeds 0, 1, 2; `4,7` is the seeds 4 and 7 (`4,` is the one seed 4)."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"--seeds takes a count (3) or a list (0,5,7), got {text!r}") from None
    if "," not in text:
        return list(range(whole("--seeds", numbers[0]))) if numbers else []
    return list(dict.fromkeys(whole("a seed", number, low=0) for number in numbers))


def _digest(e: Experiment, names: list[str], seeds: list[int]) -> str:
    return hashlib.sha256(json.dumps([e.id, names, seeds]).encode()).hexdigest()[:8]


def _announce(console: Console, e: Experiment, out: Path) -> None:
    length = " / ".join(f"{value} {word}" for word, value in (("rounds", e.rounds), ("uploads", e.uploads)) if value)
    words = [e.algorithm, "on", e.dataset + ",", f"{e.num_clients} clients, {e.availability},", f"{length}, seed {e.seed}"]
    console.print(" ".join(words) + f" -> {out}", highlight=False, soft_wrap=True)


def _finish(console: Console, history: History, out: Path) -> None:
    last = history.rows[-1]
    accuracy = history.last("test_accuracy")
    result = f"test accuracy {show('test_accuracy', accuracy)}" if accuracy is not None else f"test loss {history.last('test_loss'):.4g}"
    up, down = (f"{last[f'vectors_{way}']} vectors ({last[f'bytes_{way}'] / 1e6:.3g} MB) {way}" for way in ("up", "down"))
    console.print(f"{result} after {last['round'] + 1} rounds, {last['uploads']} uploads; {up}, {down}", highlight=False)
    console.print(f"see it: mimicfl report {out}", highlight=False, soft_wrap=True)
