"""Collects the active clients of one or more runs into a list of jobs: the samples of every step, the rates and the instructions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...clients.optimizers import Rule
from ...clients.train import draw
from ...seeds import number
from ..interface import ClientUpdates, TrainRequest
from ..population import different, largest
from .buffers import ChangingBuffers, Packed


@dataclass(frozen=True)
class Needs:
    """The capacity that a lane needs for the largest job; programs are built for it."""

    batch: int
    steps: int
    shift: bool = False
    prox: bool = False
    augment: bool = False
    momentum: bool = False
    clip: bool = False
    first: bool = False  # the first and the last gradient are sent
    last: bool = False
    rule: Rule | None = None  # of the clients' optimizer
    multipliers: tuple[tuple[str, float], ...] = ()  # of learning rates, by name pattern

    def covers(self, other: "Needs") -> bool:
        return self._optimizer == other._optimizer and all(getattr(self, name) >= getattr(other, name) for name in self._sizes)

    @property
    def _optimizer(self) -> tuple[Any, ...]:
        """What is part of a program, so that a program for other clients does not cover it."""
        return self.rule, self.multipliers

    @property
    def plain_sgd(self) -> bool:
        """Whether every step is w -= eta (gradient + shift + mu (w - w_t))."""
        return not (self.momentum or self.clip or self.first or self.last or self.rule or self.multipliers)

    @property
    def _sizes(self) -> list[str]:
        return [field.name for field in fields(self) if field.name not in ("rule", "multipliers")]

    @classmethod
    def of(cls, requests: Sequence[TrainRequest]) -> "Needs":
        """Return the capacity for these requests and for any other clients of the same populations."""
        populations = {(id(request.clients), id(request.local)): request for request in requests}
        sizes = [largest(request.clients, request.local) for request in populations.values()]
        return cls(
            batch=max(batch for batch, _ in sizes),
            steps=max(steps for _, steps in sizes),
            shift=any(isinstance(request.instructions.shift, Tensor) or request.instructions.shift != 0 for request in requests),
            prox=any(request.instructions.mu != 0 for request in requests),
            augment=requests[0].clients.data.augment,
            momentum=any(request.local.momentum != 0 and request.local.rule is None for request in requests),
            clip=any(request.local.clip_norm != 0 for request in requests),
            first=any("first_gradient" in request.instructions.send for request in requests),
            last=any("last_gradient" in request.instructions.send for request in requests),
            rule=requests[0].local.rule,  # runs that train together have the same
            multipliers=requests[0].local.lr_multipliers,
        )

    def merged(self, other: "Needs") -> "Needs":
        """Return the capacity for both; an optimizer is replaced by the other's."""
        return replace(other, **{name: max(getattr(self, name), getattr(other, name)) for name in self._sizes})


@dataclass(frozen=True)
class Jobs:
    """One row per job. A job's batches are concatenated, `batch` entries each; short batches are padded with their first sample."""

    steps: np.ndarray  # [J] number of batches
    sizes: Tensor  # [J, K] int32, samples per batch
    samples: Tensor  # [J, K * batch] int32, row numbers in the data
    moves: Tensor | None  # [J, K * batch, 3] int8, crops and flips if the data is augmented
    keys: Tensor  # [J] int64, random keys for dropout layers
    request: np.ndarray  # [J] index of the request
    eta: Tensor  # [J]
    mu: Tensor  # [J]
    momentum: Tensor  # [J]
    clip: Tensor  # [J] infinite if gradients are not clipped
    decay: Tensor  # [J] weight decay that is part of shift and mu; gradients that are sent include it
    w: Tensor  # [requests, d]
    buffers: Packed  # [requests, n] each, buffers that training changes
    shift: Tensor | None  # [J, d]

    def __len__(self) -> int:
        return len(self.steps)

    def arranged(self, arrange: Callable[[Tensor], Tensor]) -> "Jobs":
        """Return the same jobs with the entries of every parameter vector reordered."""
        return replace(self, w=arrange(self.w), shift=None if self.shift is None else arrange(self.shift))

    def refuse_batches_of_one(self, requests: Sequence[TrainRequest]) -> None:
        """Raise a `ValueError`, as PyTorch does, if BatchNorm would get one value per channel in a job."""
        sizes, clients = self.sizes.cpu().numpy(), np.concatenate([request.active for request in requests])
        single = (sizes == 1) & (np.arange(sizes.shape[1]) < self.steps[:, None])
        for job in np.flatnonzero(single.any(axis=1))[:1]:
            where = f"client {clients[job]} has a batch of one sample in round {requests[self.request[job]].t}"
            raise ValueError(f"Expected more than 1 value per channel when training: {where}")


def list_jobs(requests: Sequence[TrainRequest], batch: int, buffers: ChangingBuffers) -> Jobs:
    """Build the list of jobs on the device."""
    clients, which = different(requests)
    plans = [_plan(request, client, batch) for request, client in clients]
    steps = np.array([len(sizes) for sizes, _, _ in plans])
    most = int(steps.max())
    sizes = np.ones((len(plans), most), dtype=np.int32)
    samples = np.zeros((len(plans), most * batch), dtype=np.int32)
    augment = plans[0][2] is not None
    moves = np.zeros((len(plans), most * batch, 3), dtype=np.int8) if augment else None
    for plan, (own, rows, shifts) in enumerate(plans):
        sizes[plan, : len(own)] = own
        samples[plan, : len(rows)] = rows
        if moves is not None and shifts is not None:
            moves[plan, : len(rows)] = shifts
    keys = _keys(requests)
    device, dtype = requests[0].w.device, requests[0].w.dtype
    belongs = np.repeat(np.arange(len(requests)), [len(request.active) for request in requests])

    def column(values: list[float]) -> Tensor:
        return up(np.array(values)[belongs]).to(dtype)

    def up(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    def each(array: np.ndarray) -> Tensor:
        """The rows of plans as rows of jobs; the plans alone are copied to the device."""
        return up(array) if len(plans) == len(which) else up(array)[up(which)]

    return Jobs(
        steps=steps[which],
        sizes=each(sizes),
        samples=each(samples),
        moves=None if moves is None else each(moves),
        keys=up(keys),
        request=belongs,
        eta=column([request.eta_L for request in requests]),
        mu=column([request.instructions.mu for request in requests]),
        momentum=column([request.local.momentum for request in requests]),
        clip=column([request.local.clip_norm or math.inf for request in requests]),
        decay=column([request.local.l2 for request in requests]),
        w=torch.stack([request.w for request in requests]),
        buffers=buffers.of_requests([request.buffers for request in requests]),
        shift=_shifts(requests),
    )


Plan = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _keys(requests: Sequence[TrainRequest]) -> np.ndarray:
    known: dict[tuple[int, int, int], int] = {}
    wanted = [(request.seed, request.t, client) for request in requests for client in request.active.tolist()]
    for seed, t, client in wanted:
        if (seed, t, client) not in known:
            known[seed, t, client] = number(seed, "layers", t, client)
    return np.array([known[key] for key in wanted])


def _plan(request: TrainRequest, client: int, batch: int) -> Plan:
    """Return one client's batch sizes, sample rows and augmentation moves, with every batch padded to `batch` entries."""
    drawn, order, moves = draw(request.clients, client, request.local, request.seed, (request.t, client))
    sizes, rows = np.array(drawn), request.clients.split[client][order]
    if (sizes != batch).any():
        begin = np.cumsum(sizes) - sizes
        place = np.arange(batch)
        spread = (begin[:, None] + np.where(place < sizes[:, None], place, 0)).reshape(-1)
        rows, moves = rows[spread], None if moves is None else moves[spread]
    return sizes, rows, None if moves is None else moves.astype(np.int8)


def _shifts(requests: Sequence[TrainRequest]) -> Tensor | None:
    if not any(isinstance(request.instructions.shift, Tensor) or request.instructions.shift for request in requests):
        return None
    d = requests[0].w.numel()
    parts = []
    for request in requests:
        shift = request.instructions.shift
        parts.append(shift if isinstance(shift, Tensor) else request.w.new_full((len(request.active), d), float(shift)))
    return torch.cat(parts)


@dataclass(frozen=True)
class Results:
    """The results of the jobs; rows follow the list of jobs."""

    g: Tensor  # [J, d]
    total: Tensor  # [J] sum of the batch losses
    sent: dict[str, Tensor]  # [J, d] each
    buffers: Packed  # [J, n] each

    def arranged(self, arrange: Callable[[Tensor], Tensor]) -> "Results":
        """Return the same results with the entries of every parameter vector reordered."""
        return replace(self, g=arrange(self.g), sent={name: arrange(rows) for name, rows in self.sent.items()})

    def split(self, requests: Sequence[TrainRequest], jobs: Jobs, buffers: ChangingBuffers) -> list[ClientUpdates]:
        """Return the updates of each request."""
        steps = torch.from_numpy(jobs.steps).to(self.g.device)
        loss = self.total / steps.to(self.total.dtype)
        cut = [len(request.active) for request in requests]
        parts = zip(requests, self.g.split(cut), steps.split(cut), loss.split(cut), strict=True)
        sent, changed = ({name: rows.split(cut) for name, rows in named.items()} for named in (self.sent, buffers.stacked(self.buffers)))

        def held(k: int, request: TrainRequest) -> dict[str, Tensor]:
            """The buffers after training; those that training does not change, once per client."""
            return {
                name: changed[name][k] if name in changed else value.expand(len(request.active), *value.shape)
                for name, value in request.buffers.items()
            }

        return [
            ClientUpdates(rows, K, mean, held(k, request), {name: sent[name][k] for name in request.instructions.send})
            for k, (request, rows, K, mean) in enumerate(parts)
        ]
