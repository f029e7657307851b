"""Shrinks a failure: pieces are removed as long as it fails in the same way."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
SECONDS = 20.0  # for one failure


def shrink(pieces: Sequence[T], fails: Callable[[list[T]], bool], seconds: float = SECONDS) -> list[T]:
    """Drop pieces, halves first and then one by one, while `fails` returns true."""
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
