"""`mimicfl availability`: draw schedules and traces, convert traces, fit a synthetic pattern or trace to one."""

import argparse
import itertools
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from .. import participation as patterns
from ..data import datasets
from ..data.partition import PARTITIONS
from ..errors import UsageError, integer, one_of
from ..participation import FromTrace
from ..participation.patterns import PATTERNS
from ..participation.traces.intervals import DAY
from ..participation.traces.summary import by_hour, sentences
from ..plugins import load_plugins
from ..registry import describe
from ..report import figures
from ..settings import Experiment

SHADES = " ░▒▓█"


def availability(arguments: argparse.Namespace, console: Console) -> None:
    {"show": show, "convert": convert, "fit": fit, "twin": twin}[arguments.action](arguments, console)


def show(arguments: argparse.Namespace, console: Console) -> None:
    """Draw the schedule of a pattern; for a trace, print its statistics as well."""
    target = Path(arguments.out) if arguments.out else None
    if target:
        one_of("the ending of --out", target.suffix, [".png", ".svg", ".pdf"])
    load_plugins(arguments.plugins or [])
    pattern = patterns.make(arguments.pattern)
    rounds, clients = _size(pattern, arguments)
    available = patterns.schedule(pattern, rounds, clients, arguments.seed, _class_counts(pattern, arguments, clients))
    console.print(f"{arguments.pattern}, seed {arguments.seed}: clients down, rounds across", soft_wrap=True)
    console.print(draw(available, console.width - 14))
    for sentence in patterns.observe(available).sentences():
        console.print(sentence)
    if isinstance(pattern, (FromTrace, patterns.Diurnal)):
        trace = pattern.trace if isinstance(pattern, FromTrace) else pattern.trace(7 * DAY, clients, arguments.seed)
        console.print("the trace:" if isinstance(pattern, FromTrace) else "a week of it:")
        _print_trace(trace, console)
    if target:
        figures.save(figures.availability(available, f"{arguments.pattern}, seed {arguments.seed}"), target)
        console.print(f"figure {target}", soft_wrap=True)


def _size(pattern: patterns.Pattern, arguments: argparse.Namespace) -> tuple[int, int]:
    usual = pattern.values.shape if isinstance(pattern, patterns.Explicit) else (100, 30)
    if isinstance(pattern, FromTrace):
        named = 0 if isinstance(pattern.devices, str) else len(pattern.devices)
        usual = (max(1, min(round(DAY / pattern.round), 1000)), named or min(len(pattern.trace), 100))  # a day of rounds
    rounds = integer("--rounds", usual[0] if arguments.rounds is None else arguments.rounds)
    return rounds, integer("--clients", usual[1] if arguments.clients is None else arguments.clients)


def _class_counts(pattern: patterns.Pattern, arguments: argparse.Namespace, clients: int) -> np.ndarray | None:
    if not pattern.needs_labels:
        return None
    e = Experiment(dataset=arguments.dataset, num_clients=clients, seed=arguments.seed).resolved()
    loaded = datasets.load(e.dataset, num_clients=clients, seed=e.seed)
    split = PARTITIONS.make(e.partition, labels=loaded.y_train, ids=loaded.ids, num_clients=clients, seed=e.seed)
    return loaded.class_counts(split)


def convert(arguments: argparse.Namespace, console: Console) -> None:
    """Convert a trace of any supported format to the neutral format."""
    target = _target(arguments)
    trace = patterns.read_trace(arguments.pattern, arguments.format, arguments.rule)
    patterns.write_trace(trace, target)
    _print_trace(trace, console)
    console.print(f"written to {target}", soft_wrap=True)


def _target(arguments: argparse.Namespace) -> str:
    if not arguments.target:
        raise UsageError(f"name the file to write: mimicfl availability {arguments.action} TRACE NEW.csv (or NEW.parquet)")
    return str(arguments.target)


def twin(arguments: argparse.Namespace, console: Console) -> None:
    """Write a synthetic trace that is fitted to each device of a trace, and print both sets of statistics."""
    target = _target(arguments)
    trace = patterns.read_trace(arguments.pattern, arguments.format, arguments.rule)
    made = patterns.twin(trace, integer("--seed", arguments.seed, low=0))
    patterns.write_trace(made, target)
    console.print("the trace:")
    _print_trace(trace, console)
    console.print(f"its twin, seed {arguments.seed}:")
    _print_trace(made, console)
    console.print(f"written to {target}", soft_wrap=True)


def fit(arguments: argparse.Namespace, console: Console) -> None:
    """Print the `diurnal` pattern with a trace's statistics, and both sets of statistics."""
    trace = patterns.read_trace(arguments.pattern, arguments.format, arguments.rule)
    pattern = patterns.fit(trace, arguments.round)
    week = pattern.trace(7 * DAY, max(len(trace), 500), arguments.seed)
    console.print("the trace:")
    _print_trace(trace, console)
    console.print(f"a week of {len(week)} devices of the fitted pattern, seed {arguments.seed}:")
    _print_trace(week, console)
    console.print(describe(PATTERNS, pattern), soft_wrap=True, highlight=False, markup=False)


def _print_trace(trace: patterns.Trace, console: Console) -> None:
    for sentence in sentences(trace):
        console.print(f"  {sentence}", soft_wrap=True)
    hours = by_hour(trace, 48)
    top = max(float(hours.max()), 1e-12)
    marks = "".join(SHADES[int(np.ceil(share / top * (len(SHADES) - 1)))] for share in hours)
    line = Text("  0 h ").append(marks, style="cyan").append(f" 24 h  (darkest: {100 * top:.1f} % of the devices)")
    console.print(line, soft_wrap=True)


def draw(available: np.ndarray, width: int, most_clients: int = 60) -> Text:
    """The schedule as text: a full block is a client available in all rounds of that character, a shade in some of them."""
    rounds, clients = available.shape
    columns = min(rounds, max(10, width))
    edges = np.linspace(0, rounds, columns + 1).astype(int)
    shown = min(clients, most_clients)
    text = Text(no_wrap=True)
    for i in range(shown):
        share = [available[a:b, i].mean() for a, b in itertools.pairwise(edges)]
        marks = "".join("·" if s == 0 else "█" if s == 1 else "▓" if s > 0.5 else "▒" if s > 0.25 else "░" for s in share)
        text.append(f"{i:4} ", style="dim")
        text.append(marks, style="cyan")
        text.append(f" {100 * available[:, i].mean():4.0f} %\n", style="dim")
    if clients > shown:
        text.append(f"     ... and {clients - shown} more clients\n", style="dim")
    return text
