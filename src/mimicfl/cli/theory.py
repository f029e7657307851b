"""`theory check` and `theory show`: compare a run's rates with the paper's conditions, and plot its diagnoses."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ..clients.losses import built_in_name
from ..clients.params import flatten
from ..errors import UsageError
from ..experiments.build import build_problem
from ..experiments.results import check_known, settings_of
from ..files import make_folder
from ..metrics.history import History, read
from ..metrics.store import RunFolder, find_runs
from ..plugins import load_plugins
from ..registry import parse
from ..report import theory_figures
from ..report.figures import save
from ..report.summary import group
from ..report.theory import Check, check
from ..report.theory_rows import diagnosed
from ..settings import MADE_BY, Experiment
from ..theory.constants import constants
from ..theory.population import Population


def theory(arguments: argparse.Namespace, console: Console) -> None:
    (_check if arguments.action == "check" else _show)(arguments, console)


def _folders(arguments: argparse.Namespace) -> list[RunFolder]:
    return find_runs(arguments.runs)


def _check(arguments: argparse.Namespace, console: Console) -> None:
    for folder in _folders(arguments):
        history = read(folder)
        if not history.rows:
            raise UsageError(f"{folder.path} has no finished round yet: nothing to check")
        L, K, sentences = _constants(folder, history, arguments)
        found = check(history, L, K, arguments.tau_max, arguments.nu)
        words = [f"{key} {history.config.get(key)}" for key in ("global_lr", "lr", "update")]
        gaps = f"largest gap {found.rounds.tau_max} rounds, empty ones not counted"
        checked = "" if arguments.tau_max is None else f"; checked for gaps up to {arguments.tau_max}"
        lines = [f"{folder.path}: {history.config.get('algorithm')}, {', '.join(words)}, K = {K}", *sentences, f"{gaps}{checked}"]
        console.print("\n  ".join(lines), soft_wrap=True)
        table = Table("condition", "for", "holds in", "fails from round", box=None, pad_edge=False)
        for c in found.conditions:
            first = c.fails_from
            table.add_row(c.text, c.needed_by, f"{int(c.holds.sum())} of {len(c.holds)}", "never" if first is None else str(first))
        console.print(table)
        scale = K if history.config.get("update", "sum") == "sum" else 1
        name = parse(str(history.config.get("algorithm")))[0]
        if name not in ("fedavg", "mimic"):
            console.print(f"these theorems are about FedAvg and MimiC; they say nothing about {name}", soft_wrap=True)
        if history.config.get("average"):
            console.print("they are about the models that clients train from, not about their mean, which is evaluated", soft_wrap=True)
        for sentence in _conclusions(found, scale):
            console.print(sentence, soft_wrap=True)


def _conclusions(found: Check, scale: int) -> list[str]:
    """The conclusions from the table; `scale` is the ratio of an update to a mean gradient."""
    whole, groups = found.certified >= found.length, len(found.rounds.groups)
    how_far = f"the whole run, {found.length} rounds" if whole else f"the first {found.certified} of {found.length} rounds"
    sentences = [f"Theorem 2 is certified for {how_far}"]
    rate = f"--global-lr theory:c={found.c / scale:.4g},beta={found.beta:g}"
    sentences.append(f"  largest c |S_t| / (t + beta) it certifies for {found.length} rounds and tau_max {found.tau_max}: {rate}")
    if found.constant is None:
        sentences.append(f"no mixing bound: {found.no_mixing}")
    else:
        mixed = "the whole run" if found.mixed >= found.length else f"the first {found.mixed} rounds"
        sentences.append(f"the mixing bound is certified for {mixed} (MimiC, full batches)")
        sentences.append(f"  largest constant rate it certifies on this schedule: --global-lr {found.constant / scale:.4g}")
    if groups > 1:
        sentences.append(
            f"after the first round the clients fall into {groups} groups that are never active together: "
            "MimiC's corrections do not mix between them, "
            "and it may converge to a wrong point at any learning rate (docs/theory.md)"
        )
    return sentences


def _constants(folder: RunFolder, history: History, arguments: argparse.Namespace) -> tuple[float, int, list[str]]:
    """L and K: given, or diagnosed, or computed from the run's settings at its first and last model."""
    rows = diagnosed(history)
    L, K = arguments.L, arguments.K
    K = round(float(np.mean([d["K"] for d in rows]))) if K is None and rows else K
    if L is not None and K is not None:
        return L, K, [f"L = {L:g} (given)"]
    known = [d["L"] for d in rows if d["L"] is not None]
    if L is None and known:
        spread = max(d["sigma2"] for d in rows) ** 0.5
        kappa = np.sqrt(np.max([d["kappa2"] for d in rows], axis=0))
        facts = f"sigma = {spread:.4g}, kappa_i = {kappa.min():.4g} to {kappa.max():.4g} (largest at the {len(rows)} diagnosed rounds)"
        return max(known), K, [f"L = {max(known):.4g} ({rows[0]['L_how']})", facts]
    if (source := folder.config.get("source")) in MADE_BY:
        missing = " and ".join(name for name, value in (("--L", L), ("--K", K)) if value is None)
        made = f"{folder.path} was made from {MADE_BY[source]}, which its folder does not hold"
        raise UsageError(f"{made}; give {missing}, or run it with diagnose='every=10'")
    return _rebuilt(folder, history, L, K, arguments.plugins or [])


def _named(folder: RunFolder, plugins: Sequence[str]) -> Experiment:
    """The run's settings for reading: code is loaded only from files that the user names, never from those that the folder names."""
    e = settings_of(folder)
    load_plugins(plugins)
    files = f"it was made with --plugin {' --plugin '.join(e.plugins)}" if e.plugins else "it was registered in Python"
    check_known(e, folder, f"{files}; if you trust this code, name its file: mimicfl theory check {folder.path} --plugin FILE")
    return dataclasses.replace(e, plugins=[])


def _rebuilt(folder: RunFolder, history: History, L: float | None, K: int | None, plugins: Sequence[str]) -> tuple[float, int, list[str]]:
    problem = build_problem(dataclasses.replace(_named(folder, plugins), device="cpu", precision="fp32").resolved())
    first, local, sizes = flatten(problem.template), problem.local, problem.clients.sizes.tolist()
    steps = [len(local.batch_sizes(size)) for size in sizes]
    sentences = [f"clients take {min(steps)} to {max(steps)} local steps; K = {round(np.mean(steps))}"] if min(steps) < max(steps) else []
    K = round(float(np.mean(steps))) if K is None else K
    if L is not None:
        return L, K, [f"L = {L:g} (given)", *sentences]
    kind, batches = built_in_name(problem.loss), [local.batch_sizes(size)[0] for size in sizes]
    points = [first, *([history.params.to(first)] if history.params.numel() == first.numel() else [])]
    found = constants(Population(problem.template, problem.clients, problem.loss), points, batches, kind)
    return found.L, K, [*found.sentences(), *sentences]


def _show(arguments: argparse.Namespace, console: Console) -> None:
    folders = _folders(arguments)
    groups = group([history for folder in folders if (history := read(folder)).rows])
    figures, notes = theory_figures.draw(groups)
    if not figures:
        raise UsageError(f"{folders[0].path} was not diagnosed: run it in a new folder with --diagnose every=10")
    target = Path(arguments.out or arguments.runs[0])
    make_folder(target)
    table = Table("algorithm", "first E_t", "last E_t", "last gamma_t", "last |grad f|²", "cost", box=None, pad_edge=False)
    for g in theory_figures.seen(groups):
        rows = diagnosed(g.runs[0])
        cost = f"{rows[-1]['passes']} passes, {sum(d['seconds'] for d in rows):.2g} s"
        table.add_row(g.label, *[f"{v:.3g}" for v in (rows[0]["E"], rows[-1]["E"], rows[-1]["gamma"], rows[-1]["grad2"])], cost)
    console.print(table)
    for note in notes:
        console.print(note, style="dim", soft_wrap=True)
    for name, figure in figures.items():
        console.print(f"figure {save(figure, target / f'theory-{name}.png')}", soft_wrap=True)
