"""The time of plain training, estimated from the model's calls and operations: the same number at any time and on any machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..params import Workspace
from .run import Run


@dataclass(frozen=True)
class Speed:
    """Seconds per unit of work, fitted to MLPs, LeNet, ResNets with GroupNorm, an LSTM and VGG-11: within a factor of two for all."""

    client: float  # drawing a client's batches and loading its model
    step: float  # a local step, without forward and backward
    call: float
    convolution: float  # extra for each convolution: preparing a small one takes longer than computing it
    flop: float
    element: float  # each number that a call returns


SPEED = {"cpu": Speed(2e-4, 1e-4, 5e-6, 1e-4, 2e-11, 2e-10), "cuda": Speed(2e-4, 5e-4, 1.5e-5, 2e-5, 1e-13, 2e-12)}
# Below this many operations per product or convolution a second thread gains little, and stalls when another program needs the core.
SMALL_CALL = 2**25


class Counter(TorchDispatchMode):
    """Counts torch operations while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.products = self.convolutions = self.flops = self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        self.elements += sum(part.numel() for part in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(part, Tensor))
        formula = flop_registry.get(packet := func._overloadpacket)
        if formula is not None:
            self.products += 1
            self.convolutions += "convolution" in str(packet)
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


@dataclass(frozen=True)
class Cost:
    """The cost of forward and backward on one batch: calls, and counts that grow with the batch as a + b * samples."""

    calls: int
    products: int
    convolutions: int
    flops: tuple[float, float]
    elements: tuple[float, float]

    @classmethod
    def of(cls, run: Run) -> "Cost":
        """Counted on two and on four samples; guessed from the number of parameters if counting fails."""
        try:
            two, four = (_counted(run, samples) for samples in (2, 4))
        except Exception:  # a guess is enough: it only decides whether to prepare a faster engine
            return cls(50, 6, 0, (0.0, 6.0 * run.work.w.numel()), (0.0, 0.0))
        return cls(two.calls, two.products, two.convolutions, _line(two.flops, four.flops), _line(two.elements, four.elements))

    def step(self, samples: np.ndarray, device: str) -> np.ndarray:
        """Seconds of local steps, given the number of samples in each."""
        speed = SPEED[device]
        fixed = speed.step + self.calls * speed.call + self.convolutions * speed.convolution
        flops, elements = (a + b * samples for a, b in (self.flops, self.elements))
        return np.asarray(fixed + flops * speed.flop + elements * speed.element)

    def small(self, samples: int) -> bool:
        """Is a step with this many samples too small for several threads?"""
        return bool(self.flops[0] + self.flops[1] * samples < SMALL_CALL * max(1, self.products))


def _counted(run: Run, samples: int) -> Counter:
    module = Workspace(run.template, run.device).module.train()  # a copy: counting must not change its buffers
    rows = torch.arange(samples, device=run.device) % len(run.clients.x)
    inputs = run.data.inputs(run.clients.x[rows], run.clients.dtype)
    counter = Counter()
    with torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []), counter:
        run.loss(module(inputs), run.clients.y[rows]).backward()
    return counter


def _line(two: float, four: float) -> tuple[float, float]:
    slope = (four - two) / 2
    return two - 2 * slope, slope


class Workload:
    """The plain training of these runs, done and left, in estimated seconds."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.cost = Cost.of(runs[0])  # they share the model
        self.rounds = {run: np.concatenate([[0.0], np.cumsum(_per_round(run, self.cost))]) for run in runs}
        self.total = sum(float(rounds[-1]) for rounds in self.rounds.values())

    def done(self, more: int = 0) -> float:
        """Estimated seconds trained so far, or after `more` further rounds of every run."""
        return sum(float(rounds[min(max(0, run.t + more), len(rounds) - 1)]) for run, rounds in self.rounds.items())

    def left(self) -> float:
        return self.total - self.done()


def _per_round(run: Run, cost: Cost) -> np.ndarray:
    """Estimated seconds of plain training in each round, [rounds]."""
    if run.local.lists:
        each = np.array([_client(run, cost, client, int(size)) for client, size in enumerate(run.clients.sizes)])
    else:
        sizes, of = np.unique(run.clients.sizes, return_inverse=True)
        each = np.array([_client(run, cost, 0, int(size)) for size in sizes])[of]
    return np.array([each[row].sum() for row in run.available])


def _client(run: Run, cost: Cost, client: int, size: int) -> float:
    batches = np.array(run.local.batch_sizes(size, client))
    return SPEED[run.device.type].client + float(cost.step(batches, run.device.type).sum())
