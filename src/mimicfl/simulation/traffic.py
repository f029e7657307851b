"""How much clients receive and send in a round, and how long they need for it."""

import numpy as np

from ..algorithms import trait
from ..algorithms.server import Server
from ..participation import distributions
from ..participation.distributions import Distribution
from ..problem import Problem


def client_seconds(
    problem: Problem, server: Server, seed: int, speed: Distribution | None, bandwidth: Distribution | None
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
        one = traffic(server, 1, 1)
        seconds += 8e-6 * (one["bytes_up"] + one["bytes_down"]) / distributions.drawn("bandwidth", bandwidth, n, seed)
    return seconds


def traffic(server: Server, down: int, up: int) -> dict[str, int]:
    """The vectors and bytes of a round in which `down` clients receive the model and `up` clients send updates."""
    vectors = {"up": trait(server.algorithm, "uploads"), "down": trait(server.algorithm, "downloads")}
    size, extra = server.w.numel() * server.w.element_size(), sum(b.numel() * b.element_size() for b in server.buffers.values())
    found = {}
    for way, clients in (("up", up), ("down", down)):
        found[f"vectors_{way}"] = clients * vectors[way]
        found[f"bytes_{way}"] = clients * (vectors[way] * size + extra)  # buffers are sent with the first vector
    return found
