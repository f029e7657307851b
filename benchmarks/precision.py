"""Measures the effect of TF32 and bfloat16 on the accuracy without a GPU, by rounding the operands of every product as these formats do.

    python benchmarks/precision.py --seeds 3 --uploads 100

`fp32 again` is full float32 on another engine. A different rounding order alone changes a run, so this is the baseline for the effect of
the short formats. Products are summed in float32, as on a GPU; with bf16 their results are rounded as well.
"""

import argparse
import contextlib
import dataclasses
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mimicfl.experiments.execute import run
from mimicfl.paper.studies import STUDIES
from mimicfl.settings import Experiment

PRODUCTS = {torch.conv2d, nn.functional.conv2d, nn.functional.linear}
Round = Callable[[Tensor], Tensor]


def tf32(x: Tensor) -> Tensor:
    """Round to ten bits of mantissa instead of 23."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


class Rounded(TorchFunctionMode):
    """Rounds the operands of products in the forward and backward pass."""

    def __init__(self, shorten: Round, results: bool) -> None:
        super().__init__()
        self.shorten, self.results = shorten, results

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        x, weight, *rest = args
        shorten, back = Shorten.apply, ShortenGradient.apply
        y = back(func(shorten(x, self.shorten), shorten(weight, self.shorten), *rest, **(kwargs or {})), self.shorten)
        return shorten(y, self.shorten) if self.results else y


class Shorten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shorten: Round) -> Tensor:
        return shorten(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None


class ShortenGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shorten: Round) -> Tensor:
        ctx.shorten = shorten
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.shorten(dy), None


KINDS: dict[str, tuple[str, Rounded | None]] = {  # name -> engine, rounding
    "fp32": ("native", None),
    "fp32 again": ("plain", None),
    "tf32": ("plain", Rounded(tf32, results=False)),
    "bf16": ("plain", Rounded(bf16, results=True)),
}


def accuracy(job: tuple[str, Experiment]) -> float:
    """Return the test accuracy after the last round, in percent."""
    kind, experiment = job
    engine, rounded = KINDS[kind]
    torch.set_num_threads(1)
    with rounded or contextlib.nullcontext():
        history = run(dataclasses.replace(experiment, engine=engine))
    return 100 * float(history.last("test_accuracy"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--uploads", type=int, default=100)
    parser.add_argument("--algorithms", nargs="+", default=["mimic"])
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    study = STUDIES["table-4-fmnist"]
    jobs = [
        (kind, dataclasses.replace(study.experiment("10%", name, seed), uploads=given.uploads, eval_every=given.uploads))
        for name in given.algorithms
        for kind in KINDS
        for seed in range(given.seeds)
    ]
    print(f"{study.title}, P = 10 %, {given.uploads} uploads, {given.seeds} seeds", flush=True)
    with ProcessPoolExecutor(given.processes, multiprocessing.get_context("spawn")) as pool:
        found = iter(pool.map(accuracy, jobs))
        for name in given.algorithms:
            full: list[float] = []
            for kind in KINDS:
                ours = [next(found) for _ in range(given.seeds)]
                full = full or ours
                off = [a - b for a, b in zip(ours, full, strict=True)]
                each = ", ".join(f"{d:+.2f}" for d in off)
                print(f"{name:9} {kind:10} {statistics.mean(ours):6.2f}  {statistics.mean(off):+.2f} seed by seed ({each})", flush=True)


if __name__ == "__main__":
    main()
