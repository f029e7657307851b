"""Benchmark of the engines: check that they agree, then measure the wall time per client-step, with the engines interleaved."""

import copy
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..algorithms import Instructions
from ..clients.local_sgd import LocalSGD
from ..clients.losses import Loss, as_loss
from ..clients.models import build
from ..clients.params import flatten, load, trainable
from ..data.arrays import as_split
from ..data.clients import Clients
from ..data.dataset import Data
from ..data.partition import iid
from ..data.samples import forward, rows
from ..errors import UsageError, integer, one_of
from ..problem import find_device
from ..settings.declare import MOST_LANES
from .capabilities import TOLERANCE, Unsupported, agree
from .create import create
from .interface import TrainRequest
from .plain import PlainEngine
from .stacked.lanes import ENOUGH_LANES
from .torch_overrides import without_dropout
from .torch_settings import exact

SHAPES = {"lenet": (1, 28, 28), "vgg11": (3, 32, 32), "cnn": (3, 32, 32), "resnet": (3, 32, 32), "mlp": (1, 8, 8), "logistic": (1, 8, 8)}
# The learning rate does not affect the timing. It is tiny so that the comparison is one of gradients: in 40 steps at 0.01, a deep network
# amplifies a difference of 1e-6 in its weights to two thirds of its update.
RATE = 1e-6


@dataclass(frozen=True)
class Timing:
    """Microseconds per client-step of one engine, with the spread over the repeats."""

    engine: str
    cohort: int
    median: float
    lowest: float
    highest: float
    rounds: float  # per second
    memory: float  # peak MiB on the device in the engine's first round, including its buffers; 0 on a CPU
    difference: float  # from plain, relative to the norm of the update


class Bare:
    """The usual hand-written loop: one client after another, `loss.backward()` and `torch.optim.SGD`."""

    name = "bare"

    def __init__(self, model: nn.Module, clients: Clients, loss: Loss) -> None:
        self.model, self.loss = copy.deepcopy(model).to(clients.device), loss

    def train(self, requests: Sequence[TrainRequest]) -> list[Any]:
        for request in requests:
            for client in request.active.tolist():
                optimizer = torch.optim.SGD(trainable(load(self.model, request.w)), lr=request.eta_L)
                clients = request.clients
                for chosen in torch.from_numpy(clients.split[client]).to(request.w.device).split(int(request.local.batch_size or 0)):
                    optimizer.zero_grad()
                    self.loss(forward(self.model, clients.inputs(chosen)), rows(clients.y, chosen)).backward()
                    optimizer.step()
        return []


def bench(
    model: str, batch_size: int, steps: int, cohorts: list[int], repeats: int, device: str = "cpu", precision: str = "fp32", only: str = ""
) -> tuple[list[Timing], list[str]]:
    """Time a bare loop and every engine that supports the model.

    Returns the timings, and one note per engine: the time it took to prepare, or the reason why it is missing.
    """
    where = find_device(device)
    one_of("precision", precision, list(TOLERANCE))
    clients, net, local = _workload(model, integer("batch_size", batch_size), integer("steps", steps), max(cohorts), where)
    loss = as_loss("cross-entropy")
    timings: list[Timing] = []
    notes: list[str] = []
    with exact(precision):
        for m in cohorts:
            active, w = np.arange(integer("cohort", m)), flatten(net).to(where)
            share = torch.full((m,), 1 / m, device=where)
            request = TrainRequest(0, active, share, w, {}, Instructions(), RATE, RATE, clients, local, seed=0)
            engines, new = _engines(net, clients, loss, precision, m, only.split(",") if only else [])
            timings += _compare(engines, request, integer("repeats", repeats), precision)
            notes += [note for note in new if note not in notes]
    return timings, notes


def makers(net: nn.Module, clients: Clients, loss: Loss, precision: str, m: int) -> dict[str, Callable[[], Any]]:
    """Return a function per fast engine that prepares it for m clients; it raises `Unsupported` if the engine cannot run the model."""
    lanes, streams = min(m, ENOUGH_LANES), min(m, MOST_LANES["streams"])
    labels = {
        **{"native": "native", "workers": "workers", "batched": f"batched:{lanes}", "compiled": f"batched:{lanes}:compiled"},
        **{"streams": f"streams:{streams}", "compiled-streams": f"streams:{streams}:compiled"},
    }
    return {name: functools.partial(create, label, net, clients, loss, precision) for name, label in labels.items()}


def _engines(net: nn.Module, clients: Clients, loss: Loss, precision: str, m: int, only: list[str]) -> tuple[list[Any], list[str]]:
    """Prepare the bare loop, the plain engine and the fast engines that support the model; also return a note per fast engine."""
    fast = makers(net, clients, loss, precision, m)
    default = ("native", "workers") if clients.device.type == "cpu" else ("native", "batched", "compiled", "streams", "compiled-streams")
    engines: list[Any] = [Bare(net, clients, loss), PlainEngine(net, clients, loss)]
    notes = []
    for name in only or default:
        start = time.perf_counter()
        try:
            engines.append(fast[one_of("engine", name, fast)]())
            notes.append(f"{name} was ready in {time.perf_counter() - start:.1f} s")
        except Unsupported as reason:
            notes.append(f"{name} is missing: {reason}")
    return engines, notes


def _workload(model: str, batch: int, steps: int, clients: int, device: torch.device) -> tuple[Clients, nn.Module, LocalSGD]:
    shape = SHAPES.get(model.partition(":")[0], (1, 28, 28))
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (integer("cohort", clients) * batch * steps, *shape), dtype=torch.uint8, generator=random)
    y = torch.arange(len(x)) % 10
    data = Data(x, y, x[:10], y[:10], name="noise")
    net = build(model, data)
    net = without_dropout(net, data.inputs(x[:2], torch.float32)) or net  # engines draw dropout differently: compare without it
    return Clients(data, as_split(iid(y, clients), len(y)), device, torch.float32), net, LocalSGD(epochs=1, batch_size=batch)


def _compare(engines: list[Any], request: TrainRequest, repeats: int, precision: str) -> list[Timing]:
    first = [_with_memory(engine, request) for engine in engines]
    peaks = [peak for _, peak in first]
    truth = first[1][0][0]
    steps, gaps = int(truth.K.sum()), [0.0, 0.0]
    for engine, ([ours], _) in zip(engines[2:], first[2:], strict=True):
        gaps.append(float((ours.g - truth.g).norm() / truth.g.norm()))
        try:
            agree(ours, truth, TOLERANCE[precision])
        except Unsupported as reason:
            raise UsageError(f"{engine.name}: {reason}; the benchmark times only engines that match plain") from None
    took: list[list[float]] = [[] for _ in engines]
    for _ in range(repeats):
        for engine, times in zip(engines, took, strict=True):
            times.append(1e6 * seconds(engine, request) / steps)
    return [
        Timing(
            _label(engine),
            len(request.active),
            median := statistics.median(times),
            min(times),
            max(times),
            1e6 / (median * steps),
            peak,
            gap,
        )
        for engine, times, gap, peak in zip(engines, took, gaps, peaks, strict=True)
    ]


def seconds(engine: Any, request: TrainRequest) -> float:
    """Train a round, until the device has finished; return the wall time."""
    _synchronize(request.w.device)
    start = time.perf_counter()
    engine.train([request])
    _synchronize(request.w.device)
    return time.perf_counter() - start


def _label(engine: Any) -> str:
    if not getattr(engine, "compiled", False):
        return str(engine.name)
    return "compiled" if engine.name == "batched" else f"compiled-{engine.name}"


def _with_memory(engine: Any, request: TrainRequest) -> tuple[list[Any], float]:
    """Train a first round, which also builds and warms up the engine; return its updates and the peak MiB that it added."""
    device = request.w.device
    if device.type != "cuda":
        return engine.train([request]), 0.0
    _synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    updates = engine.train([request])
    _synchronize(device)
    return updates, (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _synchronize(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
