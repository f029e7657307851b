"""The interface of an engine: training requests in, client updates out. Engines are independent of algorithms, schedules and files."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from ..algorithms import Instructions
from ..algorithms.updates import ClientUpdates as ClientUpdates
from ..algorithms.updates import Request, Start
from ..clients.local_sgd import LocalSGD
from ..clients.local_update import check_send
from ..data.clients import Clients, Holdout
from ..problem import Problem


@dataclass(frozen=True)
class TrainRequest(Request):
    """The server's request plus everything that training needs: the clients' data, the local SGD settings and the seed."""

    clients: Clients
    local: LocalSGD
    seed: int

    @classmethod
    def of(cls, request: Request, problem: Problem, seed: int) -> "TrainRequest":
        """Add the run's data and settings to a server request.

        Weight decay becomes part of the instructions: decay w = decay w_0 + decay (w - w_0), where w_0 is the client's start.
        """
        given, start = request.instructions, request.instructions.start
        shift, mu = problem.local.decayed(request.w if start is None else start, given.shift, given.mu)
        if problem.local.loop is None:
            check_send(given.send)
        given = Instructions(shift.expand(len(request.active), -1) if isinstance(shift, Tensor) else shift, mu, start, given.send)
        values = {field.name: getattr(request, field.name) for field in fields(request)} | {"instructions": given}
        return cls(**values, clients=problem.clients, local=problem.local, seed=seed)

    def by_start(self) -> "list[TrainRequest]":
        """Requests whose clients all start from `w`: this one, or one per client if each has its own start."""
        given = self.instructions
        if given.start is None:
            return [self]
        rows = [slice(row, row + 1) for row in range(len(self.active))]
        parts = [
            Instructions(given.shift[row] if isinstance(given.shift, Tensor) else given.shift, given.mu, send=given.send) for row in rows
        ]
        starts = self.starts or [Start(w, self.buffers, self.eta_L) for w in given.start]
        return [
            replace(
                self,
                active=self.active[row],
                share=self.share[row],
                instructions=one,
                starts=None,
                numbers=None,
                mean_suffices=False,
                **vars(start),
            )
            for row, one, start in zip(rows, parts, starts, strict=True)
        ]


def train_clients(engine: "Engine", requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
    """The updates for each request, one per run; engines only see requests whose clients share a start."""
    parts = [request.by_start() for request in requests]
    calls = parts if engine.separates_runs else [[part for each in parts for part in each]]
    found = iter([updates for call in calls for updates in engine.train(call)])
    return [ClientUpdates.cat([next(found) for _ in each]) for each in parts]


class Engine(Protocol):
    """Trains the clients of one run, or of several runs that share the model, the loss and the data."""

    name: str
    label: str  # the name stored in checkpoints, which includes the number of lanes and whether the step is compiled

    @property
    def room(self) -> int | None:
        """How many clients train in parallel; None if there is no fixed limit."""
        ...

    @property
    def separates_runs(self) -> bool:
        """Whether the clients of each run must train in a call of their own, so that other runs do not change the last bits."""
        ...

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]: ...

    def like(self, model: nn.Module) -> "Engine":
        """Return the same engine for another module with the same parameters."""

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> Tensor | None:
        """Return the test outputs [r, n, ...] of r models [r, d], or None if the engine is no faster than evaluating each module."""


class TrainingRun(Protocol):
    """The part of a run that engine selection reads, and the fields that it sets."""

    problem: Problem
    seed: int
    active: np.ndarray  # bool [rounds, N]
    engine: str  # label of the engine in use, or of the engine at the last checkpoint
    threads: int  # 0 if results do not depend on the number of threads, or before it is set

    @property
    def t(self) -> int: ...

    @property
    def rounds(self) -> int: ...

    def example_request(self) -> TrainRequest:
        """Return a request for the first client at the current round."""

    def checkpoint(self) -> None: ...
