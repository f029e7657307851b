"""Shrinks a failure by removing pieces as long as it fails in the same way."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
SECONDS = 20.0  # per failure


def shrink(pieces: Sequence[T], fails: Callable[[list[T]], bool], seconds: float = SECONDS) -> list[T]:
    """Remove pieces, first halves and then single ones, as long as `fails` returns True."""
    left, limit, size = list(pieces), time.monotonic() + seconds, max(1, len(pieces) // 2)
    while left and time.monotonic() < limit:
        start, before = 0, len(left)
        while start < len(left) and time.monotonic() < limit:
            fewer = left[:start] + left[start + size :]
            if fails(fewer):
                left = fewer
            else:
                start += size
        if size == 1 and len(left) == before:
            break
        size = max(1, size // 2)
    return left
