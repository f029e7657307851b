"""Local training of one client in one round. The simulator and the Flower client share this code."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ..data.augment import random_moves
from ..data.clients import Clients
from ..seeds import number, stream, torch_stream
from .local_sgd import LocalSGD
from .local_update import LocalResult, local_update
from .loop import run_loop
from .losses import Loss
from .params import Workspace


def train_client(
    work: Workspace,
    clients: Clients,
    client: int,
    local: LocalSGD,
    loss: Loss,
    seed: int,
    key: tuple[int, int],
    eta_L: float,
    shift: Tensor | float = 0.0,
    mu: float = 0.0,
    send: Sequence[str] = (),
) -> LocalResult:
    """Train one client in a workspace that holds its start. `send` names the vectors to return besides g.

    `client` is the index in `clients`; all randomness is keyed by `key` = (round, client).
    """
    sizes, order, moves = draw(clients, client, local, seed, key)
    batches = clients.batches(client, order, sizes, moves, number(seed, "transform", *key))
    with torch_stream(seed, "layers", *key, device=clients.device):
        if local.loop is not None:
            return run_loop(work, list(batches), eta_L, loss, local, key, shift, mu, send)
        return local_update(work, batches, eta_L, loss, local, shift, mu, send)


def draw(
    clients: Clients, client: int, local: LocalSGD, seed: int, key: tuple[int, int]
) -> tuple[list[int], np.ndarray, np.ndarray | None]:
    """Draw the batches of a client for one round: batch sizes, sample order, and the crop and flip of each image if the data augments."""
    samples = int(clients.sizes[client])
    sizes = local.batch_sizes(samples, client)
    order = local.order(samples, sizes, stream(seed, "batches", *key))
    return sizes, order, random_moves(len(order), stream(seed, "augment", *key)) if clients.data.augment else None
