"""What the host spends on runs that train together, beside the training itself: start-up, requests, batches, server steps, rows.

    python benchmarks/host.py --runs 96 --rounds 20

The engine is a stand-in that draws every batch as the real one does and returns updates without training. Images and models are tiny, so
that the times are those of Python and of starting tensor operations; on a GPU each operation costs the host about as much, whatever its
size. Clients have as many samples as those of the part. Processor time, in which waiting for a disk does not count. `--count` counts the
tensor operations per run and round, by the place that called them, and the reads that wait for a GPU (no times). `--profile` prints the
functions with the most time.
"""

import argparse
import collections
import cProfile
import dataclasses
import pstats
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mimicfl.algorithms import finite
from mimicfl.algorithms.updates import ClientUpdates
from mimicfl.benchmark.progress import progress_of
from mimicfl.benchmark.suite import Part, find_part
from mimicfl.data import datasets
from mimicfl.data.clients import Holdout
from mimicfl.data.dataset import Data
from mimicfl.engines.interface import TrainRequest
from mimicfl.engines.stacked.buffers import ChangingBuffers
from mimicfl.engines.stacked.jobs import list_jobs
from mimicfl.experiments.execute import run_plan
from mimicfl.files import scratch
from mimicfl.problem import Problem
from mimicfl.settings import Experiment
from mimicfl.simulation import train as training

SAMPLES = {"digits": 1442, "fmnist": 60_000, "cifar10": 50_000}  # for training
# Operations that launch nothing:
VIEWS = {"view", "_unsafe_view", "expand", "select", "slice", "split", "split_with_sizes", "unsqueeze", "squeeze", "t", "transpose"}
VIEWS |= {"alias", "detach", "as_strided", "permute", "unbind", "empty", "empty_strided", "reshape", "lift_fresh", "new_empty"}


class StandIn:
    """An engine whose updates are random vectors, the same for every run and round, and whose outputs are random."""

    name, label, room, separates_runs = "stand-in", "plain", None, False

    def __init__(self, runs: Sequence[Any]) -> None:
        self.problem = runs[0].problem
        self.buffers = ChangingBuffers(self.problem.template, [])
        self.g = 1e-3 * torch.randn(64, self.problem.work.w.numel())
        self.counting: Counting | None = None

    def like(self, model: Any) -> "StandIn":
        return self

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        list_jobs(requests, 16, self.buffers)
        with torch.utils._python_dispatch._disable_current_modes():
            found = []
            for request in requests:
                m = len(request.active)
                sent = {name: self.g[:m].clone() for name in request.instructions.send}
                found.append(ClientUpdates(self.g[:m].clone(), torch.full((m,), 200), torch.full((m,), 0.5), {}, sent))
        return found

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            return torch.randn(1, len(samples), 10).expand(len(w), -1, -1)


class Counting(TorchDispatchMode):
    """Counts tensor operations that launch a kernel or copy, by the file of the package that called them, and reads that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()
        self.waits: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        frame: Any = sys._getframe(1)
        while frame and ("mimicfl" not in frame.f_code.co_filename or "host.py" in frame.f_code.co_filename):
            frame = frame.f_back
        where = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}" if frame else "other"
        if name == "_local_scalar_dense":
            self.waits[where] += 1
        elif name not in VIEWS:
            self.calls[where] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def measured(counting: Counting | None, times: dict[str, float]) -> Iterator[None]:
    """Replace the engine, and take the time of start-up and rounds."""
    loop = training.round_loop
    select = training.select_engine

    def timed(runs: Any, engine: Any, *rest: Any, **more: Any) -> Any:
        times["runs"] = times.get("runs", 0) + len(runs)
        times["run-rounds"] = times.get("run-rounds", 0) + sum(run.rounds - run.t for run in runs)
        times["start-up"] = times.get("start-up", 0.0) + time.process_time() - times["mark"]
        begin = time.process_time()
        if counting is None:
            found = loop(runs, engine, *rest, **more)
        else:
            with counting:
                found = loop(runs, engine, *rest, **more)
        times["mark"] = time.process_time()
        times["rounds"] = times.get("rounds", 0.0) + times["mark"] - begin
        return found

    training.round_loop = timed  # type: ignore[assignment]
    training.select_engine = lambda name, runs, *rest, **more: (StandIn(runs), "stand-in")  # type: ignore[assignment]
    try:
        yield
    finally:
        training.round_loop, training.select_engine = loop, select


def tiny_images(samples: int) -> Data:
    """As many images as the part has, of four by four pixels, in ten classes of equal size, and few for testing."""
    x = torch.randint(0, 256, (samples, 1, 4, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    y = torch.arange(samples) % 10
    return Data(x, y, x[:100], y[:100], name="tiny images")


def chosen(part: Part, runs: int, algorithms: Sequence[str]) -> dict[str, Experiment]:
    """The first tuning runs of the algorithms under the first pattern, the same number of each."""
    cells = [cell for cell in part.cells() if cell.grid.algorithm in algorithms and cell.pattern == part.patterns[0]]
    each = -(-runs // len(cells))
    return {e.name: e for cell in cells for e in progress_of(cell, {}).missing[:each]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--part", default="fmnist")
    parser.add_argument("--algorithms", nargs="*")
    parser.add_argument("--runs", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    finite.TOGETHER["cpu"] = finite.TOGETHER["cuda"]
    part = find_part(arguments.part)
    algorithms = arguments.algorithms or [grid.algorithm for grid in part.grids]
    plan = chosen(part, arguments.runs, algorithms)
    samples = SAMPLES[str(part.settings["dataset"])]
    datasets.register("tiny-images")(lambda: tiny_images(samples))
    Problem.client_accuracy = lambda self, w, buffers: []  # type: ignore[method-assign]  # the GPU's work, after the last round
    changes = {"rounds": arguments.rounds, "device": "cpu", "dataset": "tiny-images", "model": "mlp:1", "validation": 0.0}
    plan = {name: dataclasses.replace(e, **changes) for name, e in plan.items()}
    counting = Counting() if arguments.count else None
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, measured(counting, times):
        for part_of in (list(plan)[:1], list(plan)):  # the first loads data and libraries
            times.clear()
            times["mark"] = time.process_time()
            if counting:
                counting.calls.clear(), counting.waits.clear()
            profile = cProfile.Profile()
            if arguments.profile:
                profile.enable()
            with scratch():
                run_plan({name: plan[name] for name in part_of}, Path(folder) / str(len(part_of)))
            profile.disable()
    end = time.process_time()
    runs, rounds = times["runs"], times["run-rounds"]
    print(
        f"{runs:.0f} runs, {rounds:.0f} run-rounds; start-up {1e3 * times['start-up'] / runs:.1f} ms per run, "
        f"rounds {1e3 * times['rounds'] / rounds:.3f} ms per run-round, end {1e3 * (end - times['mark']) / runs:.1f} ms per run"
    )
    if counting:
        print(f"{counting.calls.total() / rounds:.1f} operations and {counting.waits.total() / rounds:.2f} waits per run-round")
        for where, n in counting.calls.most_common(30):
            print(f"  {n / rounds:8.2f}  {where}")
        for where, n in counting.waits.most_common(30):
            print(f"  waits {n / rounds:8.2f}  {where}")
    if arguments.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(60)
        pstats.Stats(profile).sort_stats("cumtime").print_stats(70)


if __name__ == "__main__":
    main()
