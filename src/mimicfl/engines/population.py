"""Facts about a whole population that every round needs, and that take a look at every client to find."""

from weakref import WeakKeyDictionary

from ..clients.local_sgd import LocalSGD
from ..data.clients import Clients

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
