"""Estimates the time of plain training from counted calls and operations, so the estimate is the same on every machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..clients.losses import Loss
from ..clients.params import Workspace, trainable
from ..data.clients import Clients
from ..data.samples import count, forward, rows
from ..problem import Problem
from .interface import TrainingRun


@dataclass(frozen=True)
class Speed:
    """Seconds per unit of work. Fitted to MLPs, LeNet, ResNets with GroupNorm, an LSTM and VGG-11: within a factor of two for each."""

    client: float  # drawing a client's batches and loading its model
    step: float  # a local step, without forward and backward
    call: float
    convolution: float  # extra per convolution: the setup of a small one takes longer than its arithmetic
    flop: float
    element: float  # per element that a call returns


SPEED = {"cpu": Speed(2e-4, 1e-4, 5e-6, 1e-4, 2e-11, 2e-10), "cuda": Speed(2e-4, 5e-4, 1.5e-5, 2e-5, 1e-13, 2e-12)}
# Below this many operations per product or convolution, a second thread gains little and stalls when another program needs the core.
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
    """The cost of a forward and backward pass on one batch. Pairs (a, b) grow with the batch as a + b * samples."""

    calls: int
    products: int
    convolutions: int
    flops: tuple[float, float]
    elements: tuple[float, float]

    @classmethod
    def of(cls, problem: Problem) -> "Cost":
        return cls.count(problem.template, problem.clients, problem.loss)

    @classmethod
    def count(cls, module: nn.Module, clients: Clients, loss: Loss) -> "Cost":
        """Count on batches of two and four samples; if that fails, guess from the number of parameters."""
        try:
            two, four = (_counted(module, clients, loss, samples) for samples in (2, 4))
        except Exception:  # a guess is enough: it decides on threads, and on whether to prepare a faster engine
            return cls(50, 6, 0, (0.0, 6.0 * sum(p.numel() for p in trainable(module))), (0.0, 0.0))
        return cls(two.calls, two.products, two.convolutions, _line(two.flops, four.flops), _line(two.elements, four.elements))

    def step(self, samples: np.ndarray, device: str) -> np.ndarray:
        """Estimate the seconds of local steps from the number of samples in each."""
        speed = SPEED[device]
        fixed = speed.step + self.calls * speed.call + self.convolutions * speed.convolution
        flops, elements = (a + b * samples for a, b in (self.flops, self.elements))
        return np.asarray(fixed + flops * speed.flop + elements * speed.element)

    def small(self, samples: int) -> bool:
        """Return whether a step with this many samples is too small for several threads."""
        return bool(self.flops[0] + self.flops[1] * samples < SMALL_CALL * max(1, self.products))


def threads_for(module: nn.Module, clients: Clients, loss: Loss, batch_size: int) -> int:
    """Return the number of threads for plain training in batches of at most this size: one if the steps are too small for several."""
    usual = torch.get_num_threads()
    return 1 if usual > 1 and clients.device.type == "cpu" and Cost.count(module, clients, loss).small(batch_size) else usual


def _counted(given: nn.Module, clients: Clients, loss: Loss, samples: int) -> Counter:
    module = Workspace(given, clients.device).module.train()  # a copy: counting must not change its buffers
    index = torch.arange(samples, device=clients.device) % count(clients.x)
    inputs = clients.inputs(index)
    counter = Counter()
    with torch.random.fork_rng(devices=[clients.device] if clients.device.type == "cuda" else []), counter:
        loss(forward(module, inputs), rows(clients.y, index)).backward()
    return counter


def _line(two: float, four: float) -> tuple[float, float]:
    slope = (four - two) / 2
    return two - 2 * slope, slope


class Workload:
    """Estimated seconds of plain training for these runs: in total, done and left."""

    def __init__(self, runs: Sequence[TrainingRun]) -> None:
        self.cost = Cost.of(runs[0].problem)  # they share the model
        self.rounds = {run: np.concatenate([[0.0], np.cumsum(_per_round(run, self.cost))]) for run in runs}
        self.total = sum(float(rounds[-1]) for rounds in self.rounds.values())

    def done(self, more: int = 0) -> float:
        """Estimate the seconds trained so far, or after `more` further rounds of every run."""
        return sum(float(rounds[min(max(0, run.t + more), len(rounds) - 1)]) for run, rounds in self.rounds.items())

    def left(self) -> float:
        return self.total - self.done()


def _per_round(run: TrainingRun, cost: Cost) -> np.ndarray:
    """Estimate the seconds of plain training in each round, [rounds]."""
    if run.problem.local.lists:
        each = np.array([_client(run, cost, client, int(size)) for client, size in enumerate(run.problem.clients.sizes)])
    else:
        sizes, of = np.unique(run.problem.clients.sizes, return_inverse=True)
        each = np.array([_client(run, cost, 0, int(size)) for size in sizes])[of]
    return np.array([each[row].sum() for row in run.active])


def _client(run: TrainingRun, cost: Cost, client: int, size: int) -> float:
    batches = np.array(run.problem.local.batch_sizes(size, client))
    return SPEED[run.problem.device.type].client + float(cost.step(batches, run.problem.device.type).sum())
