"""How fast the engines are here: wall time per client-step, interleaved, after a check that they agree."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..algorithms import Task
from ..data.clients import Clients
from ..data.dataset import Data, as_split
from ..data.partition import iid
from ..errors import UsageError, whole
from ..local.losses import as_loss
from ..local.models import build
from ..local.update import LocalSGD
from ..params import flatten
from .cohort import Ask, PlainCohort
from .native import Unsupported

SHAPES = {"lenet": (1, 28, 28), "vgg11": (3, 32, 32), "mlp": (1, 8, 8), "logistic": (1, 8, 8)}
CLIENTS = 30


@dataclass(frozen=True)
class Timing:
    """Microseconds per client-step of one engine."""

    engine: str
    cohort: int
    median: float
    lowest: float
    highest: float
    difference: float  # from plain, relative to the largest entry of the update


def bench(model: str, batch_size: int, steps: int, cohorts: list[int], repeats: int) -> tuple[list[Timing], float, str]:
    """Timings of every engine that takes the model, seconds until the native one was ready, and why it is missing if it is."""
    clients, net, local = _workload(model, whole("batch_size", batch_size), whole("steps", steps))
    engines: list[Any] = [PlainCohort(net, clients, local, as_loss("cross-entropy"))]
    start, missing = time.perf_counter(), ""
    try:
        from .native.cohort import NativeCohort

        engines.append(NativeCohort(net, clients, local, as_loss("cross-entropy")))
    except Unsupported as reason:
        missing = str(reason)
    ready = time.perf_counter() - start
    timings: list[Timing] = []
    for m in cohorts:
        if whole("cohort", m) > CLIENTS:
            raise UsageError(f"a cohort has at most {CLIENTS} clients here, got {m}")
        timings += _compare(engines, Ask(0, 0, flatten(net), {}, np.arange(m), Task(), 0.01, 0.01), whole("repeats", repeats))
    return timings, ready, missing


def _workload(model: str, batch: int, steps: int) -> tuple[Clients, torch.nn.Module, LocalSGD]:
    shape = SHAPES.get(model.partition(":")[0], (1, 28, 28))
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (CLIENTS * batch * steps, *shape), dtype=torch.uint8, generator=random)
    y = torch.arange(len(x)) % 10
    data = Data(x, y, x[:10], y[:10], name="noise")
    net = build(model, data)
    for layer in net.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0  # engines draw differently; without dropout they can be held to each other
    return Clients(data, as_split(iid(y, CLIENTS), len(y)), torch.device("cpu"), torch.float32), net, LocalSGD(epochs=1, batch_size=batch)


def _compare(engines: list[Any], ask: Ask, repeats: int) -> list[Timing]:
    answers = [engine.train(ask) for engine in engines]
    scale = float(answers[0].g.abs().max())
    gaps = [float((answer.g - answers[0].g).abs().max()) / scale for answer in answers]
    if max(gaps) > 1e-2:
        raise UsageError(f"the engines disagree by {max(gaps):.1e}: timing a wrong result would be pointless")
    took: list[list[float]] = [[] for _ in engines]
    for _ in range(repeats):
        for engine, times in zip(engines, took, strict=True):
            start = time.perf_counter()
            engine.train(ask)
            times.append(1e6 * (time.perf_counter() - start) / int(answers[0].K.sum()))
    return [
        Timing(engine.name, len(ask.active), statistics.median(times), min(times), max(times), gap)
        for engine, times, gap in zip(engines, took, gaps, strict=True)
    ]
