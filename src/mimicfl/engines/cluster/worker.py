"""A worker of a cluster: it holds the samples of some clients and trains them with an engine. It knows nothing about Ray."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...algorithms import Instructions
from ...algorithms.server import average_buffers
from ...clients.local_sgd import LocalSGD
from ...clients.losses import Loss
from ...data.clients import Clients
from ..create import create
from ..interface import ClientUpdates, Engine, TrainRequest
from ..torch_settings import exact

Packed = np.ndarray | Tensor  # arrays are read from shared memory without a copy; tensors are for types that numpy lacks
Model = tuple[Packed, dict[str, Packed]]  # w and the buffers


@dataclass(frozen=True)
class Setup:
    """What every worker needs once."""

    model: nn.Module
    loss: Loss
    clients: Clients  # without samples
    precision: str
    engine: str  # a label, as in checkpoints


@dataclass(frozen=True)
class Job:
    """Some clients of a request."""

    t: int
    active: np.ndarray  # [m]
    share: Packed  # [m]
    model: int  # which of the models that come with the jobs
    shift: Packed | float
    mu: float
    send: tuple[str, ...]
    eta_L: float
    eta: float
    local: LocalSGD
    seed: int
    mean: bool  # send the mean over these clients instead of a row for each


@dataclass(frozen=True)
class Reply:
    """The updates of a job's clients; g and the buffers have a single row if the job asked for the mean."""

    g: Packed
    K: Packed
    loss: Packed
    buffers: dict[str, Packed]
    sent: dict[str, Packed]


class Worker:
    """Trains jobs. Samples come with the first job that needs them, and stay."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.clients, self.device = setup, setup.clients, setup.clients.device
        self.engine: Engine | None = None
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # a worker has one core, and sums depend on the number of threads

    def hold(self, numbers: Sequence[int], x: Any, y: Any) -> None:
        """Keep the samples of these clients."""
        self.clients = self.clients.with_samples(numbers, *(_each(part, self.device) for part in (x, y)))
        self.engine = None  # engines may hold addresses of the samples

    def train(self, jobs: Sequence[Job], new: tuple[Sequence[int], Any, Any] | None, *models: Model) -> list[Reply]:
        """The replies to jobs, with the samples of clients that are new to this worker and the models that the jobs refer to."""
        if new is not None:
            self.hold(*new)
        if self.engine is None:
            self.engine = create(self.setup.engine, self.setup.model, self.clients, self.setup.loss, self.setup.precision)
        here = [_each(model, self.device) for model in models]
        requests = [self._request(job, *here[job.model]) for job in jobs]
        with exact(self.setup.precision):
            return [reply(*pair) for pair in zip(jobs, requests, self.engine.train(requests), strict=True)]

    def _request(self, job: Job, w: Tensor, buffers: dict[str, Tensor]) -> TrainRequest:
        share, shift = (_each(part, self.device) for part in (job.share, job.shift))
        given = Instructions(shift, job.mu, send=job.send)
        return TrainRequest(job.t, job.active, share, w, buffers, given, job.eta_L, job.eta, self.clients, job.local, job.seed)


def reply(job: Job, request: TrainRequest, updates: ClientUpdates) -> Reply:
    g, buffers = updates.g, updates.buffers
    if job.mean:
        weights = request.share / request.share.sum()
        g, buffers = (weights @ g)[None], {name: value[None] for name, value in average_buffers(buffers, weights).items()}
    named = ({name: packed(value) for name, value in each.items()} for each in (buffers, updates.sent))
    return Reply(packed(g), packed(updates.K), packed(updates.loss), *named)


def packed(tensor: Tensor) -> Packed:
    """A tensor in host memory, as an array if numpy has its type."""
    held = tensor.detach().cpu().contiguous()
    return held if held.dtype == torch.bfloat16 else held.numpy()


def unpacked(array: Packed, device: torch.device) -> Tensor:
    """A copy on the device: arrays in shared memory must not be written to."""
    return (array if isinstance(array, Tensor) else torch.tensor(array)).to(device)


def _each(value: Any, device: torch.device) -> Any:
    """Unpack every array in samples or a model; other values stay as they are."""
    if isinstance(value, dict):
        return {name: _each(part, device) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_each(part, device) for part in value)
    return unpacked(value, device) if isinstance(value, (np.ndarray, Tensor)) else value
