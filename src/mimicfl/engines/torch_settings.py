"""Context managers for torch settings: the number of threads, and the precision of matrix products on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_threads(count: int | None = None) -> Iterator[int]:
    """Set the number of threads for this block (default: keep it) and restore it at the end; yields the previous number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


@contextmanager
def exact(precision: str = "fp32") -> Iterator[None]:
    """Compute GPU products in this precision and choose deterministic convolutions, so that a run is reproducible bit for bit."""
    fast = precision != "fp32"
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = fast
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=fast):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
