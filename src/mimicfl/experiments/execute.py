"""Run experiments: one, a comparison, or a sweep. Runs that can train together do, round by round."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..algorithms import paper_algorithms
from ..algorithms.client_memory import SHARE, free_memory
from ..callbacks.interface import Callback, CallbackSet, EachRound, callback_set, copied
from ..callbacks.tracker import Tracker, never_sent
from ..engines.population import largest
from ..errors import Diverged, Paused, UsageError, check_callable
from ..files import open_files
from ..metrics.history import History, read
from ..metrics.rows import Row
from ..metrics.store import RunFolder, as_folder
from ..settings import Experiment
from ..simulation.checkpoint import check_folder
from ..simulation.run import Run
from ..simulation.train import train
from ..text import counted
from .build import Problems, build
from .comparison import Comparison
from .names import algorithm_list, named_apart, run_name, seed_list

Plan = dict[str, Experiment]  # folder name -> experiment
Built = dict[str, tuple[Experiment, Run]]
Notice = Callable[[str], None]
Progress = Callable[[Experiment, Row, int], None]  # the experiment, a row and the number of rounds
SPARE_FILES = 200  # for everything except the runs' locks


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
    each_round: EachRound | None = None,
    callbacks: Sequence[Callback | EachRound] = (),
    ray: str = "",
) -> History:
    """Run an experiment; with `out`, in that folder, where an interrupted run resumes.

    `each_round`, `callbacks` and `ray`, the address of a cluster, are as in `simulate`.
    """
    called = callback_set(each_round, callbacks)
    [history] = run_plan({"": experiment}, out, progress, notice, callbacks=called.given, ray=ray).values()
    return history


def compare(
    experiment: Experiment,
    algorithms: Any = None,
    seeds: int | Iterable[int] = 3,
    out: str | Path | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
    callbacks: Sequence[Callback | EachRound] = (),
    ray: str = "",
) -> dict[str, list[History]]:
    """Run several algorithms and seeds on the same splits, availability and initial models; finished runs are not run again.

    algorithms        names (`mimic`, `fedprox:mu=0.1`), objects (`mf.FedProx(mu=0.1)`) or classes; None: the five of the paper. A custom
                      class is stored under the name it is registered with, else under its own
    seeds             how many (3: the seeds 0, 1, 2) or which ([4, 7])
    callbacks         as in `simulate`; every run has its own copy of an object, and `info.run.name` identifies the run
    ray               as in `simulate`: the address of a cluster whose workers train the clients of all runs

    Returns one history per seed for each algorithm, by its spec: `mf.FedProx(mu=0.1)` is found as `fedprox:mu=0.1`.
    """
    if not isinstance(experiment, Experiment):
        raise UsageError(f"compare takes the settings first, as in compare(Experiment(rounds=50), ['fedavg', 'mimic']), got {experiment!r}")
    names, numbers = algorithm_list(paper_algorithms() if algorithms is None else algorithms), seed_list(seeds)
    found = iter(run_plan(plan_comparison(experiment, names, numbers), out, progress, notice, callbacks=callbacks, ray=ray).values())
    return Comparison({a: [next(found) for _ in numbers] for a in names})


def plan_comparison(experiment: Experiment, algorithms: Sequence[str], seeds: Sequence[int]) -> Plan:
    """Every algorithm with every seed, in that order, by the names of their folders."""
    runs = [dataclasses.replace(experiment, algorithm=a, seed=s) for a in algorithms for s in seeds]
    if not runs:
        raise UsageError("compare needs at least one algorithm and one seed")
    return named_apart([(run_name(e.algorithm, e.seed), e) for e in runs])


def run_plan(
    plan: Plan,
    out: str | Path | None = None,
    progress: Progress | None = None,
    notice: Notice | None = None,
    until: float | None = None,
    callbacks: Sequence[Callback | EachRound] = (),
    ray: str = "",
) -> dict[str, History]:
    """Run all experiments of the plan, each in its folder below `out`: finished runs are read, interrupted ones resume.

    At `until`, a time of `time.monotonic`, unfinished runs are saved in their folders, and `Paused` is raised.
    """
    check_callable("progress", progress, such_as="mf.ProgressBar()")
    check_callable("notice", notice, such_as="print")
    out = None if out is None else as_folder(out)
    if out is not None and "" not in plan and (out / "config.toml").exists():
        raise UsageError(f"{out} is itself a run folder: choose another folder for the runs")
    return run_built(build_all(plan), out, progress, notice, until, callbacks, ray)


def build_all(plan: Plan) -> Built:
    """Every experiment of the plan with its run before the first round."""
    made: Problems = {}
    return {name: build(experiment, made) for name, experiment in plan.items()}


def run_built(
    built: Built,
    out: Path | None,
    progress: Progress | None = None,
    notice: Notice | None = None,
    until: float | None = None,
    callbacks: Sequence[Callback | EachRound] = (),
    ray: str = "",
) -> dict[str, History]:
    """`run_plan` for runs that are built."""
    results, waiting = split_finished(built, out, callback_set(None, callbacks).given)
    _say_what_is_not_sent(list(results), out, callbacks, notice)
    failures: dict[str, Diverged] = {}
    for part, names in enumerate(groups(waiting)):
        if part and until is not None and time.monotonic() >= until:  # the first group always trains
            break
        members = {name: waiting.pop(name) for name in names}
        for name, end in _train_group(members, out, progress, notice, until, ray).items():
            if isinstance(end, Diverged):
                failures[name] = end
            elif end is not None:
                results[name] = end
    if failures:
        raise _failure(failures, len(built), paused=len(built) > len(results) + len(failures))
    if len(built) > len(results):
        raise Paused
    return {name: results[name] for name in built}


def split_finished(built: Built, out: Path | None, callbacks: Sequence[Callback | EachRound] = ()) -> tuple[dict[str, History], Built]:
    """The histories of finished runs, and the runs that are to be trained."""
    finished, waiting = dict[str, History](), Built()
    for name, (settings, run) in built.items():
        run.callbacks, run.name = CallbackSet(callbacks), name
        folder = None if out is None else out / name
        if folder is not None and (folder / "config.toml").exists():
            there = RunFolder(folder)
            saved = check_folder(there, run)
            if saved is not None and there.finished and int(saved[1]["rounds"]) >= run.planned:
                finished[name] = dataclasses.replace(read(there), template=run.problem.template)
                continue
        waiting[name] = settings, run
    return finished, waiting


def _say_what_is_not_sent(
    finished: Sequence[str], out: Path | None, callbacks: Sequence[Callback | EachRound], notice: Notice | None
) -> None:
    """Trackers see rounds as they are trained: runs that finished without a tracker are sent only if the user asks for it."""
    trackers = [each for each in callbacks if isinstance(each, Tracker)]
    count = sum(never_sent(out / name) for name in finished) if out is not None and trackers else 0
    if count and notice:
        notice(f"{counted(count, 'finished run')} not sent before; to send them: mimicfl track send {out} --track {trackers[0].spec}")


def groups(built: Built) -> list[list[str]]:
    """Names of runs that may share a program and have the same batch size, as many per group as fit into memory."""
    alike: dict[Any, list[str]] = {}
    for name, (e, run) in built.items():
        local, sent = run.problem.local, run.example_request().instructions.send
        batch, _ = largest(run.problem.clients, local)  # lanes are as wide as the largest batch
        # Momentum and clipping need a slower program, which runs without them should not use. Not every engine can make clients send more
        # than g, so algorithms that ask for it do not decide the engine of the others.
        key = (run.fingerprint.program, batch, local.program, sent, str(run.problem.device), e.engine)
        alike.setdefault(key, []).append(name)
    found = []
    for names in alike.values():
        most = _most(built[names[0]][1])
        found += [names[i : i + most] for i in range(0, len(names), most)]
    return found


def _most(run: Run) -> int:
    """How many runs like this one can be open at once, limited by memory for their states and by open files for their locks."""
    w = run.problem.workspace.w
    each = (len(run.problem.split) + 8) * w.numel() * w.element_size()
    free = torch.cuda.mem_get_info(run.problem.device)[0] if run.problem.device.type == "cuda" else free_memory()
    return max(1, min(int(SHARE * free / each), open_files() - SPARE_FILES))


def _train_group(
    members: Built, out: Path | None, progress: Progress | None, notice: Notice | None, until: float | None, ray: str
) -> dict[str, History | Diverged | None]:
    settings = {run: e for e, run in members.values()}
    folders = [None if out is None else out / name for name in members]
    on_row = (lambda run, row: progress(settings[run], copied(row), run.rounds)) if progress else None
    engine = next(iter(settings.values())).engine
    return dict(zip(members, train(list(settings), folders, engine, notice, on_row, until, ray), strict=True))


def _failure(failures: dict[str, Diverged], runs: int, paused: bool) -> Diverged:
    others = "finished or saved" if paused else "finished"
    reasons = "; ".join(f"{name}: {error}" for name, error in failures.items())
    several = f"{len(failures)} of {runs} runs diverged, the others are {others}: {reasons}"
    found = next(iter(failures.values())) if runs == 1 else Diverged(several)
    found.runs = {name: str(error) for name, error in failures.items()}
    return found
