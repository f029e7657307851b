"""The ray engine, for one run on many machines: workers train the clients, each with the same engine, and send back their updates.

The driver sends w once per round and node. Where the server needs only the mean of the updates, a worker sends one vector, the mean over
its clients; otherwise a row per client. Which clients form a group depends on the round alone. A lost worker's group trains on another
worker in the same round, to the same bits, and a resumed run forms the same groups, even if the cluster has another number of workers.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...algorithms import Instructions
from ...data.clients import Holdout
from ...errors import UsageError
from ...settings import engine_parts
from ..capabilities import TOLERANCE, Unsupported, agree
from ..interface import ClientUpdates, Engine, TrainingRun, TrainRequest
from ..plain import PlainEngine
from .connect import connect, count_workers, import_ray
from .pool import Notice, Pool
from .shares import divide
from .worker import Job, Packed, Reply, Setup, packed, unpacked

CHECKED_STEPS = 2


class RayEngine:
    """Trains the clients of runs on a Ray cluster. `local` is the engine of the workers, and evaluates models on the driver."""

    name = "ray"
    room = None

    def __init__(self, pool: Any, local: Engine, groups: int, close: Callable[[], None] = lambda: None) -> None:
        self.pool, self.local, self.groups, self.close = pool, local, groups, close
        self.label = f"{self.name}:{groups}:{local.label}"

    @classmethod
    def start(cls, address: str, local: Engine, runs: Sequence[TrainingRun], groups: int, notice: Notice | None) -> "RayEngine":
        """Start the workers on the cluster at this address, and compare them with the local engine.

        groups    into how many groups the clients are divided; 0: as many as there are workers
        """
        ray, problem = import_ray(), runs[0].problem
        with ExitStack() as opened:
            if not ray.is_initialized():  # else the user has connected, and stays so
                connect(ray, address)
                opened.callback(ray.shutdown)
            workers = min(count_workers(ray, problem.device.type), max(int(run.active.sum(axis=1).max()) for run in runs) or 1)
            groups = groups or workers
            if local.name in ("plain", "workers"):  # on a cluster, one worker per core is what the engine workers is on one machine
                local = PlainEngine(problem.model, problem.clients, problem.loss)
            label = with_fewer_lanes(local.label, groups)
            setup = Setup(problem.template, problem.loss, problem.clients.emptied(), problem.precision, label)
            pool = Pool(ray, setup, problem.clients, groups, workers, notice or (lambda text: None))
            opened.callback(pool.close)
            engine = cls(pool, local, groups)
            engine.check(runs[0])
            engine.close = opened.pop_all().close
        return engine

    @property
    def separates_runs(self) -> bool:
        return self.local.separates_runs

    def like(self, model: nn.Module) -> Engine:
        return self.local.like(model)

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> Tensor | None:
        return self.local.outputs(w, buffers, samples)

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        models = {id(request.w): (request.w, request.buffers) for request in requests}
        refs = {key: self.pool.put((packed(w), {name: packed(b) for name, b in buffers.items()})) for key, (w, buffers) in models.items()}
        parts = [divide(request.active, request.clients.sizes[request.active], self.groups) for request in requests]
        work = {}
        for group in range(self.groups):
            busy = [(request, part[group]) for request, part in zip(requests, parts, strict=True) if len(part[group])]
            if busy:
                used = list(dict.fromkeys(id(request.w) for request, _ in busy))
                work[group] = [job(request, chosen, used.index(id(request.w))) for request, chosen in busy], [refs[key] for key in used]
        replies = {group: iter(found) for group, found in self.pool.run(work).items()}
        return [
            joined(request, {group: (rows, next(replies[group])) for group, rows in enumerate(part) if len(rows)})
            for request, part in zip(requests, parts, strict=True)
        ]

    def check(self, run: TrainingRun) -> None:
        """Compare a few steps of one client per group with the local engine: the workers may have other hardware or versions."""
        request, problem = run.example_request(), run.problem
        active = np.arange(min(self.groups, len(problem.split)))
        given = request.instructions
        shift = given.shift[:1].expand(len(active), -1) if isinstance(given.shift, Tensor) else given.shift
        short = replace(problem.local, epochs=None, steps=CHECKED_STEPS)
        given, share = Instructions(shift, given.mu, send=given.send), problem.share[torch.from_numpy(active).to(problem.device)]
        request = replace(
            request, active=active, share=share, instructions=given, local=short, eta_L=1e-6, mean_suffices=False, starts=None
        )
        try:
            agree(self.train([request])[0], self.local.train([request])[0], TOLERANCE[problem.precision])
        except Unsupported as reason:
            raise UsageError(f"the workers of the Ray cluster do not match this machine: {reason}; install the same versions") from None


def with_fewer_lanes(label: str, groups: int) -> str:
    """The label of a worker's engine, which trains one of this many groups."""
    name, lanes, compiled = engine_parts(label)
    return f"{name}:{-(-lanes // groups)}{':compiled' * compiled}" if lanes else label


def cluster_parts(label: str) -> tuple[int, str]:
    """`ray:4:native` as the number of groups and the label of the workers' engine; `native` has no groups."""
    name, _, rest = label.partition(":")
    if name != RayEngine.name:
        return 0, label
    groups, _, local = rest.partition(":")
    return int(groups), local


def job(request: TrainRequest, rows: np.ndarray, model: int) -> Job:
    """These rows of a request."""
    at = torch.from_numpy(rows).to(request.w.device)
    shift = request.instructions.shift
    return Job(
        request.t,
        request.active[rows],
        packed(request.share[at]),
        model,
        packed(shift[at]) if isinstance(shift, Tensor) else shift,
        request.instructions.mu,
        request.instructions.send,
        request.eta_L,
        request.eta,
        request.local,
        request.seed,
        request.mean_suffices,
    )


def joined(request: TrainRequest, replies: dict[int, tuple[np.ndarray, Reply]]) -> ClientUpdates:
    """The updates of a request from the replies of its groups."""
    here = partial(unpacked, device=request.w.device)
    order = torch.from_numpy(np.argsort(np.concatenate([rows for rows, _ in replies.values()]))).to(request.w.device)

    def cat(parts: Sequence[Packed]) -> Tensor:
        return torch.cat([here(part) for part in parts])

    every = [reply for _, reply in replies.values()]
    K, loss = cat([reply.K for reply in every])[order], cat([reply.loss for reply in every])[order]
    g, buffers = cat([reply.g for reply in every]), {name: cat([reply.buffers[name] for reply in every]) for name in request.buffers}
    if request.mean_suffices:
        group = np.concatenate([np.full(len(rows), k) for k, (rows, _) in enumerate(replies.values())])
        return ClientUpdates(g, K, loss, buffers, group=torch.from_numpy(group).to(order.device)[order])
    sent = {name: cat([reply.sent[name] for reply in every])[order] for name in request.instructions.send}
    return ClientUpdates(g[order], K, loss, {name: rows[order] for name, rows in buffers.items()}, sent)
