"""Facts about the clients of a round that are expensive to find."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..clients.local_sgd import LocalSGD
from ..data.clients import Clients
from .interface import TrainRequest

_LARGEST: WeakKeyDictionary[Clients, dict[int, tuple[LocalSGD, tuple[int, int]]]] = WeakKeyDictionary()


def largest(clients: Clients, local: LocalSGD) -> tuple[int, int]:
    """Return the largest batch and the largest number of steps of any client."""
    known = _LARGEST.setdefault(clients, {})
    if id(local) not in known:
        sizes = clients.sizes
        likely = range(len(sizes)) if local.lists else (int(sizes.argmax()), int(sizes.argmin()))
        plans = [local.batch_sizes(int(sizes[client]), client) for client in likely]
        found = max(max(batches) for batches in plans), max(len(batches) for batches in plans)
        known[id(local)] = local, found  # holds the object, so that its id stays its own
    return known[id(local)][1]


def different(requests: Sequence[TrainRequest]) -> tuple[list[tuple[TrainRequest, int]], np.ndarray]:
    """Return the clients that train on different batches, each with its request, and which of them each client of the requests is.

    Runs that are compared train the same clients on the same batches, which are drawn once.
    """
    known: dict[tuple[Any, ...], int] = {}
    found: list[tuple[TrainRequest, int]] = []
    which = []
    for request in requests:
        population = (id(request.clients), request.local.passes, request.seed, request.t)
        for client in request.active.tolist():
            if (key := (*population, client)) not in known:
                known[key] = len(found)
                found.append((request, client))
            which.append(known[key])
    return found, np.array(which)
