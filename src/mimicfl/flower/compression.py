"""Compressed updates with error feedback: 8-bit numbers, or the largest coordinates only.

A client sends Q(g + e) and keeps e <- g + e - Q(g + e): what one round leaves out is sent in the next ones, so that the sum of what the
server received differs from the sum of the updates by the last e only. Everything on the server uses what it received. MimiC's corrections
are made from Q(g + e), too, and still sum to zero.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array

from ..errors import UsageError, number, shown
from .wire import ArraySpec, Refused, decode, numbers

BLOCK = 1024  # numbers that share one scale
LEVELS = 127
TOPK, EIGHT_BIT = "topk", "8bit"


@dataclass(frozen=True)
class Compression:
    """8bit: integers from -127 to 127 with one scale per 1024 numbers; topk:S: the share S of the coordinates with the largest values."""

    kind: str
    share: float = 1.0

    @classmethod
    def parse(cls, given: Any) -> "Compression | None":
        if given is None or given in ("", "none"):
            return None
        kind, _, value = str(given).partition(":")
        if kind == EIGHT_BIT and not value:
            return cls(kind)
        try:
            share = float(value) if kind == TOPK else math.nan
        except ValueError:
            share = math.nan
        if math.isnan(share):
            raise UsageError(f"compress must be '8bit' or 'topk:S' with a share S such as 0.01, got {shown(given)}")
        return cls(kind, number("the share of compress='topk:S'", share, low=0, high=1, open_low=True))

    @property
    def spec(self) -> str:
        return self.kind if self.kind == EIGHT_BIT else f"{TOPK}:{self.share!r}"

    def count(self, size: int) -> int:
        """Coordinates that topk sends."""
        return min(size, max(1, math.ceil(self.share * size - 1e-9)))

    def encode(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays that travel in place of the vector x [d]."""
        if self.kind == TOPK:
            count = self.count(len(x))
            index = np.sort(np.argpartition(np.abs(x), len(x) - count)[len(x) - count :]).astype(np.int64)
            return {"g.index": index.astype(np.int32 if len(x) < 2**31 else np.int64), "g.value": x[index].astype(np.float32)}
        blocks = np.zeros((math.ceil(len(x) / BLOCK), BLOCK), dtype=x.dtype)
        blocks.reshape(-1)[: len(x)] = x
        scale = (np.abs(blocks).max(axis=1) / LEVELS).astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            levels = np.where(scale[:, None] > 0, np.rint(blocks / scale[:, None].astype(x.dtype)), 0)
        return {"g.int8": levels.clip(-LEVELS, LEVELS).astype(np.int8).reshape(-1)[: len(x)], "g.scale": scale}

    def decode(self, arrays: dict[str, np.ndarray], out: np.ndarray) -> None:
        """Write the vector that the arrays stand for to `out` [d]."""
        if self.kind == TOPK:
            out[:] = 0
            out[arrays["g.index"]] = arrays["g.value"]
            return
        size, scale = len(out), arrays["g.scale"].astype(out.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            for block, start in enumerate(range(0, size, BLOCK)):
                part = out[start : start + BLOCK]
                np.multiply(arrays["g.int8"][start : start + BLOCK], scale[block], out=part, casting="unsafe")

    def read(self, arrays: dict[str, Array], out: np.ndarray) -> None:
        """Decode the arrays of a reply. Raises `Refused` if they are not what `encode` makes."""
        size = len(out)
        if self.kind == TOPK:
            count, index = self.count(size), decode(_taken(arrays, "g.index"), "g.index")
            if index.shape != (count,) or index.dtype.kind != "i" or index[0] < 0 or index[-1] >= size or not (np.diff(index) > 0).all():
                raise Refused(f"array 'g.index' must hold {count} different coordinates in order")
            value = numbers(_taken(arrays, "g.value"), ArraySpec("g.value", (count,), "float32"))
            return self.decode({"g.index": index, "g.value": value}, out)
        scale = numbers(_taken(arrays, "g.scale"), ArraySpec("g.scale", (math.ceil(size / BLOCK),), "float32"))
        levels = numbers(_taken(arrays, "g.int8"), ArraySpec("g.int8", (size,), "int8"))
        return self.decode({"g.int8": levels, "g.scale": scale}, out)

    def apply(self, x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """What travels in place of x, and what it leaves out: x - Q(x)."""
        arrays, received = self.encode(x), np.empty_like(x)
        self.decode(arrays, received)
        return arrays, x - received


def _taken(arrays: dict[str, Array], name: str) -> Array:
    if name not in arrays:
        raise Refused(f"its compressed update has no array {name!r}")
    return arrays.pop(name)
