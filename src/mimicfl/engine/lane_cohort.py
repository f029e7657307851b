"""What the batched and the streams cohort have in common: jobs in, lanes of a fitting shape, answers out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..data.clients import Clients
from ..local.losses import Loss
from .cohort import Answers, Ask
from .jobs import Jobs, Needs, hand_out, list_jobs
from .lanes import width
from .support import cannot, halving, unmoved_buffers


class LaneCohort(ABC):
    """Trains clients in lanes. What is built for a shape is kept until another shape is needed."""

    name: str

    def __init__(self, model: nn.Module, clients: Clients, loss: Loss, precision: str, lanes: int, compiled: bool = False) -> None:
        unmoved_buffers(model, clients, loss)
        self.model, self.clients, self.loss, self.precision, self.width = model, clients, loss, precision, lanes
        self.compiled = compiled  # the traced step goes to the compiler
        self.needs: Needs | None = None
        self.built = False

    @property
    def label(self) -> str:
        """What a resumed run needs to know to end bit-equal."""
        return f"{self.name}:{self.width}" + ":compiled" * self.compiled

    @property
    def room(self) -> int | None:
        return self.width or None  # not known before the first jobs where nobody said

    def prepare(self, needs: Needs) -> None:
        """Build for jobs of this size from the first: building again would take as long."""
        self.needs = self._lane(needs)

    def train(self, asks: Sequence[Ask]) -> list[Answers]:
        needs = Needs.of(asks)
        if self.needs is None or not self.needs.covers(needs):
            self.forget()
            self.needs = self._lane(needs if self.needs is None else self.needs.merged(needs))
        jobs = list_jobs(asks, self.needs.batch)
        self.width = self.width or width([len(jobs)], self.clients.device)
        g, total = halving(self, lambda: self._work_off(jobs))
        return hand_out(asks, jobs, g, total)

    def _lane(self, needs: Needs) -> Needs:
        """What a lane is built for where the jobs need this."""
        return needs

    def _work_off(self, jobs: Jobs) -> tuple[Tensor, Tensor]:
        if self.built:
            return self._run(jobs)
        with cannot(self.cannot):  # the transforms and the capture raise errors of many types
            assert self.needs is not None
            self.clients.data.inputs(self.clients.x[:1], jobs.w.dtype)  # creates its constants, which must not happen while tracing
            self._build(self.needs, jobs.w)
            found = self._run(jobs)
        self.built = True
        return found

    def forget(self) -> None:
        """Give the memory of lanes and graphs back."""
        self.built = False
        self._drop()
        if self.clients.device.type == "cuda":
            torch.cuda.empty_cache()

    cannot: str  # what is said of a model that cannot be built

    @abstractmethod
    def _build(self, needs: Needs, w: Tensor) -> None: ...

    @abstractmethod
    def _run(self, jobs: Jobs) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _drop(self) -> None: ...
