"""One client's part of a round, in a workspace that already holds w_t: the same code in the simulator and in a real federation."""

import numpy as np
from torch import Tensor

from ..data.clients import Clients
from ..data.dataset import random_moves
from ..params import Workspace
from ..seeds import stream, torch_stream
from .losses import Loss
from .update import LocalSGD, local_update


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
) -> tuple[Tensor, Tensor, int]:
    """g [d], the sum of the batch losses, and the steps K. `client` is its place in `clients`; chance follows `key` (round, client)."""
    sizes, order, moves = draw(clients, client, local, seed, key)
    with torch_stream(seed, "layers", *key, device=clients.device):
        g, total = local_update(work, clients.batches(client, order, sizes, moves), eta_L, loss, shift, mu, local.momentum, local.clip_norm)
    return g, total, len(sizes)


def draw(
    clients: Clients, client: int, local: LocalSGD, seed: int, key: tuple[int, int]
) -> tuple[list[int], np.ndarray, np.ndarray | None]:
    """A client's batches in a round: their sizes, its samples in the order they come, and how each image is moved where they are."""
    samples = int(clients.sizes[client])
    sizes = local.batch_sizes(samples, client)
    order = local.order(samples, sizes, stream(seed, "batches", *key))
    return sizes, order, random_moves(len(order), stream(seed, "augment", *key)) if clients.data.augment else None
