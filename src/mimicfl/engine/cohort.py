"""The plain cohort: one client after another. It is the truth that every faster engine is held to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..algorithms import Task
from ..data.clients import Clients, Holdout
from ..local.losses import Loss
from ..local.train import train_client
from ..local.update import LocalSGD
from ..params import Workspace


@dataclass(frozen=True)
class Ask:
    """A round as the server sends it out."""

    clients: Clients  # whose data it is
    local: LocalSGD
    t: int
    seed: int
    w: Tensor  # [d]
    buffers: dict[str, Tensor]
    active: np.ndarray  # [m] sorted client numbers
    task: Task
    eta_L: float
    eta: float  # eta_t, which only the server uses


@dataclass(frozen=True)
class Answers:
    """What the active clients send back; rows follow `Ask.active`."""

    g: Tensor  # [m, d] sum of the local steps, in gradient units
    K: Tensor  # [m] steps taken
    loss: Tensor  # [m] mean training loss of the local steps
    buffers: dict[str, Tensor] = field(default_factory=dict)  # [m, ...]


class Cohort(Protocol):
    """Trains clients: of one run, or of several that share model, loss and data."""

    name: str
    label: str  # what a checkpoint keeps of it

    @property
    def room(self) -> int | None:
        """How many clients train side by side, where more would wait for a second turn; None: it makes no difference."""
        ...

    def train(self, asks: Sequence[Ask]) -> list[Answers]: ...

    def like(self, model: nn.Module) -> "Cohort":
        """The same for another module of the same shape."""

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> Tensor | None:
        """Test outputs [r, n, ...] of r models [r, d]; None where evaluating the module one by one is no slower."""


class PlainCohort:
    """Trains the clients in turn, in one resident copy of the model."""

    name = label = "plain"
    room = None

    def __init__(self, model: nn.Module, clients: Clients, loss: Loss) -> None:
        self.clients, self.loss = clients, loss
        self.work = Workspace(model, clients.device)
        self.work.module.train()

    def like(self, model: nn.Module) -> "PlainCohort":
        return PlainCohort(model, self.clients, self.loss)

    def train(self, asks: Sequence[Ask]) -> list[Answers]:
        return [self._train(ask) for ask in asks]

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> None:
        """No faster way to the outputs than the module itself."""

    def _train(self, ask: Ask) -> Answers:
        g = torch.empty(len(ask.active), ask.w.numel(), dtype=ask.w.dtype, device=ask.w.device)
        steps, losses, buffers = [], [], []
        for row in range(len(ask.active)):
            g[row], total, count = self.train_one(ask, row)
            steps.append(count)
            losses.append(total / count)
            if ask.buffers:
                buffers.append(self.work.buffers())
        stacked = {name: torch.stack([b[name] for b in buffers]) for name in ask.buffers}
        return Answers(g, torch.tensor(steps, device=g.device), torch.stack(losses), stacked)

    def train_one(self, ask: Ask, row: int) -> tuple[Tensor, Tensor, int]:
        """g, the summed batch losses and the number of steps of the client in this row."""
        client = int(ask.active[row])
        shift = ask.task.shift[row] if isinstance(ask.task.shift, Tensor) else ask.task.shift
        self.work.load(ask.w, ask.buffers)
        key = (ask.t, client)
        try:
            return train_client(self.work, ask.clients, client, ask.local, self.loss, ask.seed, key, ask.eta_L, shift, ask.task.mu)
        except Exception as error:
            error.add_note(f"(while training client {client} in round {ask.t})")
            raise
