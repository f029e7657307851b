"""One seed becomes independent named streams, keyed (purpose, round, client).

Nothing in mimicfl depends on a global generator. A stream depends on its key alone, so the order of clients, the size of a
chunk, fusing runs or resuming one cannot change what is drawn. (torch's own layers know only the global generator: around each
client it is set aside and put back, so simulations with dropout layers belong in separate processes, not in threads.)
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
    """The random numbers of one purpose, e.g. `stream(seed, "batches", t, client)`."""
    key = np.frombuffer(_digest(seed, purpose, keys), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def number(seed: int, purpose: str, *keys: int) -> int:
    """One whole number below 2^63 for a key: a seed for generators of other kinds."""
    return int.from_bytes(_digest(seed, purpose, keys)[:8], "little") >> 1


@contextmanager
def torch_stream(seed: int, purpose: str, *keys: int, device: torch.device | None = None) -> Iterator[None]:
    """Run torch's own random layers (dropout, initialisation) on a keyed stream; the caller's generator is untouched."""
    key = number(seed, purpose, *keys)
    gpus: list[int] = []
    if device is not None and device.type == "cuda":
        gpus = [torch.cuda.current_device() if device.index is None else device.index]
    with torch.random.fork_rng(devices=gpus):
        # Seed just these generators: torch.manual_seed would also reseed GPUs that this run does not use.
        torch.default_generator.manual_seed(key)
        for index in gpus:
            torch.cuda.default_generators[index].manual_seed(key)
        yield
