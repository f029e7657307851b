"""The common part of the batched and the streams engine: it builds lanes that fit the jobs, runs the jobs and returns the updates."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...clients.losses import Loss
from ...clients.params import HALF, multipliers, trainable
from ...data.clients import Clients
from ..capabilities import BatchUse, Unsupported, halve_until_it_fits, refuse_transform, unsupported_on_error
from ..interface import ClientUpdates, TrainRequest
from .buffers import ChangingBuffers
from .jobs import Jobs, Needs, Results, list_jobs
from .lanes import Lanes, run_jobs, width
from .layout import Layout


class LaneEngine(ABC):
    """Trains clients in lanes. Lanes and graphs are kept until jobs need larger ones."""

    name: str
    layout: Layout | None = None  # of the vectors in a lane, where it is not that of the model

    def __init__(self, model: nn.Module, clients: Clients, loss: Loss, precision: str, lanes: int, compiled: bool = False) -> None:
        if kinds := {p.dtype for p in trainable(model)} & HALF:
            raise Unsupported(f"its parameters are {str(kinds.pop()).removeprefix('torch.')}")
        refuse_transform(clients.data)
        self.batch_use = BatchUse.of(model, clients)
        self.buffers = ChangingBuffers(model, self.batch_use.changing)
        self.model, self.clients, self.loss, self.precision, self.width = model, clients, loss, precision, lanes
        self.compiled = compiled
        self.needs: Needs | None = None
        self.built = False

    @property
    def label(self) -> str:
        """The name with the lanes and the compile flag, which a resumed run needs to end bit-equal."""
        return f"{self.name}:{self.width}" + ":compiled" * self.compiled

    @property
    def room(self) -> int | None:
        return self.width or None  # if not given, it is unknown before the first jobs

    @property
    def separates_runs(self) -> bool:
        """On a CPU the last bits depend on the lane, through the alignment of its memory: runs must not change each other's lanes."""
        return self.clients.device.type == "cpu"

    def prepare(self, needs: Needs) -> None:
        """Set the capacity of the lanes in advance, so that they are built only once."""
        self.needs = self._lane(needs)

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        needs = Needs.of(requests)
        if self.needs is None or not self.needs.covers(needs):
            self.forget()
            self.needs = self._lane(needs if self.needs is None else self.needs.merged(needs))
        jobs = list_jobs(requests, self.needs.batch, self.buffers)
        if self.batch_use.refuses_one:
            jobs.refuse_batches_of_one(requests)
        self.width = self.width or width([len(jobs)], self.clients.device)
        return halve_until_it_fits(self, lambda: self._build_and_run(jobs)).split(requests, jobs, self.buffers)

    def _lane(self, needs: Needs) -> Needs:
        """Return the capacity that lanes are built with, given what the jobs need."""
        return needs

    def _scale(self, needs: Needs, w: Tensor) -> Tensor | None:
        """Return the multipliers of the learning rate as a vector [d]."""
        if not needs.multipliers:
            return None
        factors = torch.tensor(multipliers(self.model, needs.multipliers), dtype=w.dtype, device=w.device)
        scale = factors.repeat_interleave(torch.tensor([p.numel() for p in trainable(self.model)], device=w.device))
        return scale if self.layout is None else self.layout.arrange(scale[None])[0]

    def _build_and_run(self, jobs: Jobs) -> Results:
        if self.built:
            return self._run(jobs)
        with unsupported_on_error(self.failure):  # transforms and graph capture raise many types of errors
            assert self.needs is not None
            self.clients.inputs(slice(1))  # creates cached constants, which must not happen while tracing
            self._build(self.needs, jobs)
            found = self._run(jobs)
        self.built = True
        return found

    def _pass(self, jobs: Jobs, lanes: Lanes, advance: Callable[[int, int], int]) -> Results:
        """Train all jobs in the lanes, whose vectors may have another order."""
        if self.layout is None:
            return run_jobs(jobs, lanes, advance)
        return run_jobs(jobs.arranged(self.layout.arrange), lanes, advance).arranged(self.layout.restore)

    def forget(self) -> None:
        """Free the memory of the lanes and graphs."""
        self.built = False
        self._drop()
        if self.clients.device.type == "cuda":
            torch.cuda.empty_cache()

    failure: str  # the reason given if the lanes cannot be built for a model

    @abstractmethod
    def _build(self, needs: Needs, jobs: Jobs) -> None: ...

    @abstractmethod
    def _run(self, jobs: Jobs) -> Results: ...

    @abstractmethod
    def _drop(self) -> None: ...
