"""The plain engine trains one client after another. It is the reference that every faster engine must match."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..clients.local_update import LocalResult
from ..clients.losses import Loss
from ..clients.params import Workspace
from ..clients.train import train_client
from ..data.clients import Clients, Holdout
from .interface import ClientUpdates, TrainRequest


class PlainEngine:
    """Trains the clients one by one in a single copy of the model."""

    name = label = "plain"
    room = None
    separates_runs = False

    def __init__(self, model: nn.Module, clients: Clients, loss: Loss, work: Workspace | None = None) -> None:
        self.clients, self.loss = clients, loss
        self.work = work or Workspace(model, clients.device)
        self.work.module.train()

    def like(self, model: nn.Module) -> "PlainEngine":
        return PlainEngine(model, self.clients, self.loss)

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        return [self._train(request) for request in requests]

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> None:
        """Return None: the module itself is evaluated."""

    def _train(self, request: TrainRequest) -> ClientUpdates:
        g = torch.empty(len(request.active), request.w.numel(), dtype=request.w.dtype, device=request.w.device)
        sent = {name: torch.empty_like(g) for name in request.instructions.send}
        steps, losses, buffers = [], [], []
        for row in range(len(request.active)):
            result = self.train_one(request, row)
            g[row] = result.g
            for name, vector in result.sent.items():
                sent[name][row] = vector
            steps.append(result.steps)
            losses.append(result.total / result.steps)
            if request.buffers:
                buffers.append(self.work.buffers())
        stacked = {name: torch.stack([b[name] for b in buffers]) for name in request.buffers}
        return ClientUpdates(g, torch.tensor(steps, device=g.device), torch.stack(losses), stacked, sent)

    def train_one(self, request: TrainRequest, row: int) -> LocalResult:
        """Train the client in this row."""
        client = int(request.active[row])
        given = request.instructions
        shift = given.shift[row] if isinstance(given.shift, Tensor) else given.shift
        self.work.load(request.w, request.buffers)
        key = (request.t, client)
        try:
            settings = (request.local, self.loss, request.seed, key, request.eta_L, shift, given.mu, given.send)
            return train_client(self.work, request.clients, client, *settings)
        except Exception as error:
            error.add_note(f"(while training client {client} in round {request.t})")
            raise
