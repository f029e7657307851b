"""How fast the engines are here: wall time per client-step, interleaved, after a check that they agree."""

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..algorithms import Task
from ..data.clients import Clients
from ..data.dataset import Data, as_split
from ..data.partition import iid
from ..errors import UsageError, one_of, whole
from ..local.losses import Loss, as_loss
from ..local.models import build
from ..local.update import LocalSGD
from ..params import flatten
from .calls import without_dropout
from .checks import pick_device
from .cohort import Ask, PlainCohort
from .drive import exact
from .lanes import ENOUGH_LANES
from .support import TOLERANCE, Unsupported, agree

SHAPES = {"lenet": (1, 28, 28), "vgg11": (3, 32, 32), "mlp": (1, 8, 8), "logistic": (1, 8, 8)}
# Nothing is timed differently by it, and what is compared are then gradients: in 40 steps at 0.01 a deep network makes of a millionth
# of difference in its weights two thirds of difference in its update.
RATE = 1e-6


@dataclass(frozen=True)
class Timing:
    """Microseconds per client-step of one engine."""

    engine: str
    cohort: int
    median: float
    lowest: float
    highest: float
    rounds: float  # a second
    memory: float  # MiB on the device for this engine's first round, its buffers included; 0 on a CPU
    difference: float  # from plain, relative to the norm of the update


class Bare:
    """What everybody writes first: one client after another, `loss.backward()` and `torch.optim.SGD`."""

    name = "bare"

    def __init__(self, model: nn.Module, clients: Clients, loss: Loss) -> None:
        self.model, self.loss = copy.deepcopy(model).to(clients.device), loss

    def train(self, asks: Sequence[Ask]) -> list[Any]:
        for ask in asks:
            for client in ask.active.tolist():
                nn.utils.vector_to_parameters(ask.w, self.model.parameters())
                optimizer = torch.optim.SGD(self.model.parameters(), lr=ask.eta_L)
                for rows in torch.from_numpy(ask.clients.split[client]).to(ask.w.device).split(int(ask.local.batch_size or 0)):
                    optimizer.zero_grad()
                    self.loss(self.model(ask.clients.data.inputs(ask.clients.x[rows], ask.w.dtype)), ask.clients.y[rows]).backward()
                    optimizer.step()
        return []


def bench(
    model: str, batch_size: int, steps: int, cohorts: list[int], repeats: int, device: str = "cpu", precision: str = "fp32", only: str = ""
) -> tuple[list[Timing], list[str]]:
    """Timings of a bare loop and of every engine that takes the model, and a sentence for each that was prepared or cannot."""
    where = pick_device(device)
    one_of("precision", precision, list(TOLERANCE))
    clients, net, local = _workload(model, whole("batch_size", batch_size), whole("steps", steps), max(cohorts), where)
    loss = as_loss("cross-entropy")
    timings: list[Timing] = []
    words: list[str] = []
    with exact(precision):
        for m in cohorts:
            ask = Ask(clients, local, 0, 0, flatten(net).to(where), {}, np.arange(whole("cohort", m)), Task(), RATE, RATE)
            engines, said = _engines(net, clients, loss, precision, m, only.split(",") if only else [])
            timings += _compare(engines, ask, whole("repeats", repeats), precision)
            words += [word for word in said if word not in words]
    return timings, words


def _engines(net: nn.Module, clients: Clients, loss: Loss, precision: str, m: int, only: list[str]) -> tuple[list[Any], list[str]]:
    """A bare loop, the plain cohort, and the fast ones that fit."""
    from .batched.cohort import BatchedCohort
    from .native.cohort import NativeCohort
    from .streams import StreamsCohort
    from .workers import WorkersCohort

    what = (net, clients, loss)
    fast: dict[str, Any] = {
        "native": lambda: NativeCohort(*what),
        "workers": lambda: WorkersCohort(*what),
        "batched": lambda: BatchedCohort(*what, precision, min(m, ENOUGH_LANES)),
        "compiled": lambda: BatchedCohort(*what, precision, min(m, ENOUGH_LANES), compiled=True),
        "streams": lambda: StreamsCohort(*what, precision, min(m, StreamsCohort.MOST)),
        "compiled-streams": lambda: StreamsCohort(*what, precision, min(m, StreamsCohort.MOST), compiled=True),
    }
    here = ("native", "workers") if clients.device.type == "cpu" else ("batched", "compiled", "streams", "compiled-streams")
    engines: list[Any] = [Bare(*what), PlainCohort(*what)]
    said = []
    for name in only or here:
        start = time.perf_counter()
        try:
            engines.append(fast[one_of("engine", name, fast)]())
            said.append(f"{name} was ready in {time.perf_counter() - start:.1f} s")
        except Unsupported as reason:
            said.append(f"{name} is missing: {reason}")
    return engines, said


def _workload(model: str, batch: int, steps: int, clients: int, device: torch.device) -> tuple[Clients, nn.Module, LocalSGD]:
    shape = SHAPES.get(model.partition(":")[0], (1, 28, 28))
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (whole("cohort", clients) * batch * steps, *shape), dtype=torch.uint8, generator=random)
    y = torch.arange(len(x)) % 10
    data = Data(x, y, x[:10], y[:10], name="noise")
    net = build(model, data)
    net = without_dropout(net, data.inputs(x[:2], torch.float32)) or net  # engines draw differently; so they can be held to each other
    return Clients(data, as_split(iid(y, clients), len(y)), device, torch.float32), net, LocalSGD(epochs=1, batch_size=batch)


def _compare(engines: list[Any], ask: Ask, repeats: int, precision: str) -> list[Timing]:
    first = [_with_memory(engine, ask) for engine in engines]
    peaks = [peak for _, peak in first]
    truth = first[1][0][0]
    steps, gaps = int(truth.K.sum()), [0.0, 0.0]
    for engine, ([ours], _) in zip(engines[2:], first[2:], strict=True):
        gaps.append(float((ours.g - truth.g).norm() / truth.g.norm()))
        try:
            agree(ours, truth, TOLERANCE[precision])
        except Unsupported as reason:
            raise UsageError(f"{engine.name}: {reason}; timing a wrong result would be pointless") from None
    took: list[list[float]] = [[] for _ in engines]
    for _ in range(repeats):
        for engine, times in zip(engines, took, strict=True):
            _settle(ask.w.device)
            start = time.perf_counter()
            engine.train([ask])
            _settle(ask.w.device)
            times.append(1e6 * (time.perf_counter() - start) / steps)
    return [
        Timing(
            _named(engine),
            len(ask.active),
            median := statistics.median(times),
            min(times),
            max(times),
            1e6 / (median * steps),
            peak,
            gap,
        )
        for engine, times, gap, peak in zip(engines, took, gaps, peaks, strict=True)
    ]


def _named(engine: Any) -> str:
    if not getattr(engine, "compiled", False):
        return str(engine.name)
    return "compiled" if engine.name == "batched" else f"compiled-{engine.name}"


def _with_memory(engine: Any, ask: Ask) -> tuple[list[Any], float]:
    """A first round, which also builds and warms up, and the MiB it took at most beyond what the others hold."""
    device = ask.w.device
    if device.type != "cuda":
        return engine.train([ask]), 0.0
    _settle(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    answers = engine.train([ask])
    _settle(device)
    return answers, (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
