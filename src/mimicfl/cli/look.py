"""`report`, `data`, `availability`: the commands that only look."""

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.text import Text

from .. import availability as patterns
from ..config import Experiment
from ..data import datasets
from ..data.datasets import ABOUT, FETCHABLE, cached, obtain
from ..data.partition import PARTITIONS
from ..engine.bench import bench as measure
from ..errors import UsageError, one_of, whole
from ..metrics.environment import environment
from ..report import figures
from ..report.report import build
from ..runner import load_plugins
from . import paper
from .train import print_report


def report(arguments: argparse.Namespace, console: Console) -> None:
    if arguments.paper:
        return paper.report(arguments, console)
    if not arguments.runs:
        raise UsageError("say which runs, as in 'mimicfl report runs/demo'")
    return print_report(console, build(arguments.runs, arguments.out))


def data(arguments: argparse.Namespace, console: Console) -> None:
    if arguments.action == "list":
        for name, about in ABOUT.items():
            where = "" if name not in FETCHABLE else f"  [{'in ' + str(cached(name)) if cached(name).is_file() else 'not fetched yet'}]"
            console.print(f"{name:10} {about}{where}", soft_wrap=True)
        return
    if not arguments.name:
        raise UsageError(f"say which dataset to fetch: mimicfl data fetch {sorted(FETCHABLE)[1]}")
    name = one_of("dataset", arguments.name, ABOUT)
    if name not in FETCHABLE:
        console.print(f"{name} needs no fetching")
        return
    arrays = obtain(name, Path(arguments.path) if arguments.path else None)
    sizes = f"{len(arrays['x_train']):,} training and {len(arrays['x_test']):,} test images"
    console.print(f"{name}: {sizes}, verified, in {cached(name)}", soft_wrap=True)


def availability(arguments: argparse.Namespace, console: Console) -> None:
    target = Path(arguments.out) if arguments.out else None
    if target:
        one_of("the ending of --out", target.suffix, [".png", ".svg", ".pdf"])
    load_plugins(arguments.plugins or [])
    pattern = patterns.make(arguments.pattern)
    usual = pattern.values.shape if isinstance(pattern, patterns.Explicit) else (100, 30)
    rounds = whole("--rounds", usual[0] if arguments.rounds is None else arguments.rounds)
    clients = whole("--clients", usual[1] if arguments.clients is None else arguments.clients)
    counts = None
    if isinstance(pattern, patterns.LabelCorrelated):
        e = Experiment(dataset=arguments.dataset, num_clients=clients, seed=arguments.seed).resolved()
        loaded = datasets.load(e.dataset, num_clients=clients, seed=e.seed)
        split = PARTITIONS.make(e.partition, labels=loaded.y_train, ids=loaded.ids, num_clients=clients, seed=e.seed)
        counts = loaded.class_counts(split)
    available = patterns.schedule(pattern, rounds, clients, arguments.seed, counts)
    console.print(f"{arguments.pattern}, seed {arguments.seed}: clients down, rounds across")
    console.print(draw(available, console.width - 14))
    for sentence in patterns.observe(available).sentences():
        console.print(sentence)
    if target:
        figures.save(figures.availability(available, f"{arguments.pattern}, seed {arguments.seed}"), target)
        console.print(f"picture {target}", soft_wrap=True)


def bench(arguments: argparse.Namespace, console: Console) -> None:
    if arguments.threads is not None:
        torch.set_num_threads(whole("--threads", arguments.threads, high=1024))
    try:
        cohorts = [int(word) for word in arguments.cohorts.split(",")]
    except ValueError:
        raise UsageError(f"--cohorts takes numbers such as 3,30, got {arguments.cohorts!r}") from None
    here = environment()
    timings, words = measure(
        arguments.model,
        arguments.batch_size,
        arguments.steps,
        cohorts,
        arguments.repeats,
        arguments.device,
        arguments.precision,
        arguments.engines or "",
    )
    gpu = f"{here['gpu']}, " if arguments.device != "cpu" and here.get("gpu") else ""
    console.print(f"{gpu}{here['processor']}, {here['threads']} threads, torch {here['torch']}, python {here['python']}", soft_wrap=True)
    for sentence in words:
        console.print(sentence, soft_wrap=True)
    console.print(
        f"{arguments.model}, batch {arguments.batch_size}, {arguments.precision}: us of wall time per client-step, median (lowest-highest)"
    )
    bare = {t.cohort: t.median for t in timings if t.engine == "bare"}
    for t in timings:
        ratio = f"{bare[t.cohort] / t.median:6.1f}x bare" if t.engine != "bare" else ""
        ratio += f", off by {t.difference:.0e}" if t.engine not in ("bare", "plain") else ""
        peak = f"  {t.memory:6.0f} MiB" if t.memory else ""
        speed = f"({t.lowest:.1f}-{t.highest:.1f})  {t.rounds:8.2f} rounds/s{peak}"
        console.print(f"  cohort {t.cohort:3}  {t.engine:8} {t.median:9.1f}  {speed}  {ratio}".rstrip(), soft_wrap=True)


def draw(available: np.ndarray, width: int, most_clients: int = 60) -> Text:
    """The schedule in characters: a full block was there, a shade was there in part of the rounds that one character holds."""
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
