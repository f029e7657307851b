"""Derive independent random streams from one seed, keyed by (purpose, round, client).

No result depends on a global generator. A stream depends only on its key, so the order of clients, the chunk size, batching
several runs, or resuming a run cannot change the numbers drawn. PyTorch's random layers (dropout) use the global generator; its
state is saved before and restored after each client. Run simulations with such layers in separate processes, not in threads.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def _digest(seed: int, purpose: str, keys: tuple[int, ...]) -> bytes:
    text = ":".join([str(seed), purpose, *map(str, keys)])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Return the generator for one key, e.g. `stream(seed, "batches", t, client)`."""
    key = np.frombuffer(_digest(seed, purpose, keys), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def number(seed: int, purpose: str, *keys: int) -> int:
    """Return an integer below 2^63 for one key, to seed other generators."""
    return int.from_bytes(_digest(seed, purpose, keys)[:8], "little") >> 1


@contextmanager
def torch_stream(seed: int, purpose: str, *keys: int, device: torch.device | None = None) -> Iterator[None]:
    """Run PyTorch's random functions (dropout, initialisation) on a keyed stream; restore the global generator on exit."""
    key = number(seed, purpose, *keys)
    gpus: list[int] = []
    if device is not None and device.type == "cuda":
        gpus = [torch.cuda.current_device() if device.index is None else device.index]
    with torch.random.fork_rng(devices=gpus):
        # Seed only these generators: torch.manual_seed would also reseed GPUs that this run does not use.
        torch.default_generator.manual_seed(key)
        for index in gpus:
            torch.cuda.default_generators[index].manual_seed(key)
        yield
