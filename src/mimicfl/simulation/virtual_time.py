"""How long clients need for a round, and how much they send in it."""

import numpy as np

from ..algorithms.server import Server
from ..participation import distributions
from ..participation.distributions import Distribution
from ..problem import Problem


def client_seconds(
    problem: Problem, seed: int, bytes_per_round: int, speed: Distribution | None, bandwidth: Distribution | None
) -> np.ndarray | None:
    """The virtual seconds that each client needs for a round: download, training, upload, [N]. None without speed and bandwidth."""
    n = len(problem.split)
    if speed is None and bandwidth is None:
        return None
    seconds = np.zeros(n)
    if speed is not None:
        samples = [sum(problem.local.batch_sizes(int(size), client)) for client, size in enumerate(problem.clients.sizes)]
        seconds += np.array(samples) / distributions.drawn("speed", speed, n, seed)
    if bandwidth is not None:
        seconds += 8e-6 * bytes_per_round / distributions.drawn("bandwidth", bandwidth, n, seed)
    return seconds


def bytes_sent(server: Server, vectors: int) -> int:
    """The bytes of so many vectors of the model's size; buffers are sent with the first."""
    extra = sum(b.numel() * b.element_size() for b in server.buffers.values())
    return vectors * server.w.numel() * server.w.element_size() + extra
