"""The plain cohort: one client after another. It is the truth that every faster engine is held to."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ..algorithms import Task
from ..data.clients import Clients, Holdout
from ..errors import Diverged
from ..local.losses import Loss
from ..local.train import train_client
from ..local.update import LocalSGD
from ..params import Workspace


@dataclass(frozen=True)
class Ask:
    """A round as the server sends it out."""

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


class PlainCohort:
    """Trains the clients of a round in turn, in one resident copy of the model."""

    name = "plain"

    def __init__(self, model: nn.Module, clients: Clients, local: LocalSGD, loss: Loss) -> None:
        self.clients, self.local, self.loss = clients, local, loss
        self.work = Workspace(model, clients.device)
        self.work.module.train()

    def train(self, ask: Ask) -> Answers:
        g = torch.empty(len(ask.active), ask.w.numel(), dtype=ask.w.dtype, device=ask.w.device)
        steps, losses, buffers = [], [], []
        for row, client in enumerate(ask.active.tolist()):
            shift = ask.task.shift[row] if isinstance(ask.task.shift, Tensor) else ask.task.shift
            self.work.load(ask.w, ask.buffers)
            try:
                g[row], total, count = train_client(
                    self.work, self.clients, client, self.local, self.loss, ask.seed, (ask.t, client), ask.eta_L, shift, ask.task.mu
                )
            except Exception as error:
                error.add_note(f"(while training client {client} in round {ask.t})")
                raise
            if not bool(torch.isfinite(total) & torch.isfinite(g[row]).all()):
                raise Diverged(f"the training loss is no longer finite in round {ask.t} at client {client} (local rate {ask.eta_L:g})")
            steps.append(count)
            losses.append(total / count)
            if ask.buffers:
                buffers.append(self.work.buffers())
        stacked = {name: torch.stack([b[name] for b in buffers]) for name in ask.buffers}
        return Answers(g, torch.tensor(steps, device=g.device), torch.stack(losses), stacked)

    def predictor(self, samples: Holdout) -> None:
        """No faster way to the outputs than the module itself."""
