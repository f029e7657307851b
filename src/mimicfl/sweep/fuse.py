"""Runs that can train together do: the active clients of all of them are one cohort, round by round."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import runner
from ..config import Experiment
from ..engine.keeper import check_folder
from ..engine.run import Run
from ..engine.simulate import together
from ..errors import Diverged, Paused, UsageError, check_callable
from ..files import open_files
from ..metrics.history import History, read
from ..metrics.store import RunFolder, as_folder
from ..rows import SHARE, free_memory

Plan = dict[str, Experiment]  # a folder's name -> what runs in it
Notice = Callable[[str], None]
SPARE_FILES = 200  # for everything except the runs' locks


def compare(
    experiment: Experiment,
    algorithms: Any = runner.ALL,
    seeds: int | Iterable[int] = 3,
    out: str | Path | None = None,
    progress: runner.Reporter | None = None,
    notice: Notice | None = None,
) -> dict[str, list[History]]:
    """Several algorithms and seeds on the same splits, availability and initial models; runs finished before are not run again.

    algorithms        names (`mimic`, `fedprox:mu=0.1`), objects (`mf.FedProx(mu=0.1)`) or classes; own classes are kept under the name
                      they are registered with, else under their own
    seeds             how many (3: the seeds 0, 1, 2) or which ([4, 7])

    The histories come by the algorithm's text, one a seed: `mf.FedProx(mu=0.1)` is found as `fedprox:mu=0.1`.
    """
    if not isinstance(experiment, Experiment):
        raise UsageError(f"compare takes settings first, as in compare(Experiment(rounds=50), ['fedavg', 'mimic']), got {experiment!r}")
    names, numbers = runner.algorithm_list(algorithms), runner.seed_list(seeds)
    found = iter(carry_out(plan_comparison(experiment, names, numbers), out, progress, notice).values())
    return {a: [next(found) for _ in numbers] for a in names}


def plan_comparison(experiment: Experiment, algorithms: Sequence[str], seeds: Sequence[int]) -> Plan:
    """Every algorithm with every seed, in that order, by the names of their folders."""
    runs = [dataclasses.replace(experiment, algorithm=a, seed=s) for a in algorithms for s in seeds]
    if not runs:
        raise UsageError("compare needs at least one algorithm and one seed")
    return runner.named_apart([(runner.run_name(e.algorithm, e.seed), e) for e in runs])


def carry_out(
    plan: Plan,
    out: str | Path | None = None,
    progress: runner.Reporter | None = None,
    notice: Notice | None = None,
    deadline: float | None = None,
) -> dict[str, History]:
    """All runs of the plan, each in its folder below `out`; what was finished before is read, what was stopped goes on.

    After the deadline (of `time.monotonic`) what is not through is saved in its folder, and `Paused` is raised.
    """
    check_callable("progress", progress)
    out = None if out is None else as_folder(out)
    if out is not None and (out / "config.toml").exists():
        raise UsageError(f"{out} is a run folder itself: give the runs a folder of their own")
    results: dict[str, History] = {}
    waiting: dict[str, tuple[Experiment, Run]] = {}
    for name, experiment in plan.items():  # a mistake in the last run must not surface after an hour of the first
        settled, run = runner.begin(experiment)
        folder = None if out is None else out / name
        if folder is not None and (folder / "config.toml").exists():
            there = RunFolder(folder)
            saved = check_folder(there, run, settled.to_dict())
            if saved is not None and there.finished and int(saved[1]["rounds"]) >= run.planned:
                results[name] = dataclasses.replace(read(there), template=run.template)
                continue
        waiting[name] = settled, run
    failures: list[str] = []
    parts = groups({name: run for name, (_, run) in waiting.items()}, {name: e.engine for name, (e, _) in waiting.items()})
    for part, names in enumerate(parts):
        if part and deadline is not None and time.monotonic() >= deadline:  # the first gets on however short the time
            break
        done, failed = _together({name: waiting.pop(name) for name in names}, out, progress, notice, deadline)
        results |= done
        failures += failed
    stopped = len(plan) - len(results) - len(failures)
    if failures:
        others = "finished or saved" if stopped else "finished"
        raise Diverged(f"{len(failures)} of {len(plan)} runs diverged, the others are {others}: " + "; ".join(failures))
    if stopped:
        raise Paused
    return {name: results[name] for name in plan}


def groups(runs: dict[str, Run], engines: dict[str, str]) -> list[list[str]]:
    """Names of runs that may share a program and have the same batch size, as many per group as fit into memory."""
    alike: dict[Any, list[str]] = {}
    for name, run in runs.items():
        batch = max(run.local.batch_sizes(int(run.clients.sizes.max())))  # as it is, not as it may be: lanes are as wide
        # Momentum and clipping make another program, which a run without them should not get.
        key = (run.fingerprint.program, batch, bool(run.local.momentum), bool(run.local.clip_norm), str(run.device), engines[name])
        alike.setdefault(key, []).append(name)
    found = []
    for names in alike.values():
        most = _most(runs[names[0]])
        found += [names[i : i + most] for i in range(0, len(names), most)]
    return found


def _most(run: Run) -> int:
    """How many runs like this one can be open at once, limited by memory for their states and by open files for their locks."""
    w = run.work.w
    each = (len(run.split) + 8) * w.numel() * w.element_size()
    free = torch.cuda.mem_get_info(run.device)[0] if run.device.type == "cuda" else free_memory()
    return max(1, min(int(SHARE * free / each), open_files() - SPARE_FILES))


def _together(
    members: dict[str, tuple[Experiment, Run]],
    out: str | Path | None,
    progress: runner.Reporter | None,
    notice: Notice | None,
    deadline: float | None,
) -> tuple[dict[str, History], list[str]]:
    settings = {id(run): e for e, run in members.values()}
    opened: list[Run] = []
    try:
        for name, (e, run) in members.items():
            if out is not None:
                run.open(Path(out) / name, e.to_dict(), e.checkpoint_every or None)
            opened.append(run)
        watch = (lambda run, row: progress(settings[id(run)], row, run.rounds)) if progress else None
        found = together(opened, next(iter(members.values()))[0].engine, notice, watch, deadline)
    finally:
        for run in opened:
            run.close()
    done = {name: h for name, h in zip(members, found, strict=True) if isinstance(h, History)}
    return done, [f"{name}: {h}" for name, h in zip(members, found, strict=True) if isinstance(h, Diverged)]
