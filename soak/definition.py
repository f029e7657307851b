"""A federated run implemented directly from its definition, as simply as possible: the reference for the plain engine.

It shares only the seeds of the batches with the package. Gradients come from autograd on a copy of the model; the optimizers, clipping,
weight decay and the server's step are implemented here.
"""

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mimicfl.clients.losses import as_loss
from mimicfl.seeds import stream


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def set_vector(model: nn.Module, w: Tensor) -> None:
    place = 0
    for p in model.parameters():
        if p.requires_grad:
            p.data = w[place : place + p.numel()].view_as(p).clone()
            place += p.numel()


def batches(arguments: dict[str, Any], t: int, client: int) -> Iterator[Tensor]:
    """Yield the sample numbers of each local step. Every epoch is shuffled again, and its last batch may be smaller."""
    local, part = arguments["local"], torch.from_numpy(arguments["split"][client])
    n = len(part)
    size = min(local.batch_size or n, n)
    epochs, steps = (value[client] if isinstance(value, (tuple, list)) else value for value in (local.epochs, local.steps))
    left = epochs * math.ceil(n / size) if steps is None else steps
    chance = stream(arguments["seed"], "batches", t, client)
    while left:
        order = np.arange(n) if size == n else chance.permutation(n)
        for start in range(0, n, size):
            if left:
                yield part[torch.from_numpy(order[start : start + size])]
                left -= 1


def train(model: nn.Module, arguments: dict[str, Any], t: int, client: int, shift: Tensor | float, mu: float) -> tuple[Tensor, float, int]:
    """Run local SGD in place; return the sum of the steps' directions, the mean batch loss and the number of steps."""
    data, local, loss = arguments["data"], arguments["local"], as_loss(arguments["loss"])
    dtype = vector(model).dtype
    start = vector(model)
    g, steps, losses = torch.zeros_like(start), Steps(local, start), []
    model.train()
    for rows in batches(arguments, t, client):
        parameters = [p for p in model.parameters() if p.requires_grad]
        value = loss(model(data.inputs(data.x_train[rows], dtype)), _targets(data.y_train[rows], dtype))
        found = torch.autograd.grad(value, parameters, allow_unused=True)
        h = torch.cat([(torch.zeros_like(p) if f is None else f).flatten() for p, f in zip(parameters, found, strict=True)])
        if local.clip_norm and h.norm() + 1e-6 > local.clip_norm:
            h = h * local.clip_norm / (h.norm() + 1e-6)
        w = vector(model)
        u = steps.next(h + shift + mu * (w - start), w)
        g = g + u
        set_vector(model, w - local.lr * u)
        losses.append(float(value))
    return g, float(np.mean(losses)), len(losses)


class Steps:
    """The steps of an optimizer, divided by the learning rate."""

    def __init__(self, local: Any, w: Tensor) -> None:
        self.local, self.k, self.u, self.v = local, 0, torch.zeros_like(w), torch.zeros_like(w)

    def next(self, h: Tensor, w: Tensor) -> Tensor:
        local, decay = self.local, self.local.weight_decay * w
        self.k += 1
        if local.optimizer == "sgd":
            h = h + decay
            self.u = local.momentum * self.u + h
            return h + local.momentum * self.u if getattr(local, "nesterov", False) else self.u
        h = h + decay if local.optimizer == "adam" else h
        (a, b), k = local.betas, self.k
        self.u = a * self.u + (1 - a) * h
        self.v = b * self.v + (1 - b) * h**2
        step: Tensor = self.u / (1 - a**k) / ((self.v / (1 - b**k)).sqrt() + local.eps)
        return step + decay if local.optimizer == "adamw" else step


def _targets(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.to(dtype) if y.is_floating_point() else y


def worth(K: int, local: Any) -> float:
    """Return how many plain gradients the sum of K steps corresponds to: those of SGD with equal gradients, else the number of steps."""
    if local.optimizer != "sgd":
        return float(K)
    steps = Steps(replace(local, weight_decay=0.0), torch.zeros((), dtype=torch.float64))
    return sum(float(steps.next(torch.ones((), dtype=torch.float64), steps.u)) for _ in range(K))


def run(arguments: dict[str, Any], active: list[list[int]]) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return the final parameters and, for each round, train_loss, test_loss and test_accuracy."""
    model = copy.deepcopy(arguments["model"])
    server = Server(arguments, vector(model))
    rows = []
    for t, clients in enumerate(active):
        loss = one_round(model, server, arguments, t, clients) if clients else None
        rows.append({"train_loss": loss, **test(model, arguments)})
    return vector(model), rows


class Server:
    """The server side of FedAvg, FedProx, MimiC and SCAFFOLD."""

    def __init__(self, arguments: dict[str, Any], w: Tensor) -> None:
        self.name, _, mu = arguments["algorithm"].partition(":mu=")
        self.mu, self.mean = float(mu or 0), arguments.get("update") == "mean"
        self.sizes = np.array([len(part) if arguments.get("weighting") == "samples" else 1.0 for part in arguments["split"]])
        self.memory = {i: torch.zeros_like(w) for i in range(len(self.sizes))}  # c_i
        self.c = torch.zeros_like(w)

    def shift(self, client: int) -> Tensor | float:
        return self.c - self.memory[client] if self.name == "scaffold" else 0.0

    def direction(self, g: dict[int, Tensor], per_step: dict[int, Tensor]) -> Tensor:
        """Return v_t, computed from the sums and the means of the clients' steps, and update the memory."""
        weight = {i: self.sizes[i] / self.sizes[list(g)].sum() for i in g}
        g = per_step if self.mean else g
        if self.name == "mimic":
            v = _sum(weight[i] * (g[i] + self.memory[i]) for i in g)
            self.memory |= {i: v - g[i] for i in g}
            return v
        if self.name == "scaffold":
            new = {i: self.memory[i] - self.c + per_step[i] for i in g}
            self.c = self.c + _sum(self.sizes[i] / self.sizes.sum() * (new[i] - self.memory[i]) for i in g)
            self.memory |= new
        return _sum(weight[i] * g[i] for i in g)


def _sum(vectors: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(vectors)).sum(0)


def one_round(model: nn.Module, server: Server, arguments: dict[str, Any], t: int, clients: list[int]) -> float:
    """Train copies of the model, update the model, and return the mean training loss."""
    local, w = arguments["local"], vector(model)
    g, per_step, losses, ends = {}, {}, [], []
    for client in clients:
        ends.append(copy.deepcopy(model))
        g[client], loss, steps = train(ends[-1], arguments, t, client, server.shift(client), server.mu)
        per_step[client] = g[client] / worth(steps, local)
        losses.append(loss)
    set_vector(model, w - arguments.get("global_lr", local.lr) * server.direction(g, per_step))
    _merge_buffers(model, ends, (server.sizes[clients] / server.sizes[clients].sum()).tolist())
    return float(np.mean(losses))


def _merge_buffers(model: nn.Module, ends: list[nn.Module], weights: list[float]) -> None:
    """Set each buffer to the mean over the clients; counters take the maximum."""
    all_of = [dict(end.named_buffers()) for end in ends]
    for name, value in model.named_buffers():
        found = [own[name] for own in all_of]
        merged = sum(w * f for w, f in zip(weights, found, strict=True)) if value.is_floating_point() else torch.stack(found).amax(0)
        value.data.copy_(merged)


@torch.no_grad()
def test(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    data = arguments["data"]
    dtype = vector(model).dtype
    model.eval()
    output, y = model(data.inputs(data.x_test, dtype)), _targets(data.y_test, dtype)
    found = {"test_loss": float(as_loss(arguments["loss"])(output, y)), "test_accuracy": None}
    if not y.is_floating_point():
        guess = (output[:, 0] > 0).long() if output.shape[1] == 1 else output.argmax(1)
        counted = y != getattr(arguments["loss"], "ignore_index", None)  # targets that the loss ignores do not count
        found["test_accuracy"] = float((guess == y)[counted].double().mean())
    return found
