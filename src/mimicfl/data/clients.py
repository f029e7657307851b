"""The samples of all clients, stored once on the training device; a client is a list of row indices."""

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .augment import crop_and_flip, transformed
from .dataset import Data
from .samples import Samples, clone, count, joined, parts, rows


class Clients:
    """Training data of all clients, on the device and in the dtype of the run."""

    def __init__(self, data: Data, split: list[np.ndarray], device: torch.device, dtype: torch.dtype) -> None:
        self.data, self.split, self.device, self.dtype = data, split, device, dtype
        self.x, self.y = data.resident("train", device, dtype)
        self.sizes = np.array([len(part) for part in split])  # [N]

    def __len__(self) -> int:
        return len(self.split)

    def inputs(self, index: Tensor | slice) -> Samples:
        """The model inputs of these training samples, as a copy."""
        x = rows(self.x, index)
        return self.data.inputs(clone(x) if isinstance(index, slice) else x, self.dtype)

    def batches(
        self, client: int, order: np.ndarray, sizes: list[int], moves: np.ndarray | None, key: int = 0
    ) -> Iterator[tuple[Samples, Samples]]:
        """Yield the batches of one client for one round.

        `order` lists indices into the client's samples; `sizes` are the batch sizes; `moves` are crop offsets and flips, or None; `key`
        seeds the random numbers of the data's transform.
        """
        indices = torch.from_numpy(self.split[client][order]).to(self.device).split(sizes)
        shifts = [None] * len(sizes) if moves is None else torch.from_numpy(moves).to(self.device).split(sizes)
        transform = self.data.transform
        generator = None if transform is None else torch.Generator(self.device).manual_seed(key)
        for batch, shift in zip(indices, shifts, strict=True):
            x = rows(self.x, batch)
            if shift is not None and isinstance(x, Tensor):
                x = crop_and_flip(x, shift)
            x = self.data.inputs(x, self.dtype)
            yield x if transform is None or generator is None else transformed(transform, x, generator), rows(self.y, batch)

    def emptied(self) -> "Clients":
        """The same clients without their samples, small enough to be sent; `with_samples` adds those of some clients elsewhere."""
        few, held = copy.copy(self), copy.copy(self.data)
        part = {f"{name}_{part}": rows(getattr(self.data, f"{name}_{part}"), slice(2)) for name in "xy" for part in ("train", "test")}
        vars(held).update(part, ids=None, test_ids=None, optimum=None, _resident={}, _scaling={})  # Data refuses assignments
        few.data, few.x, few.y = held, rows(self.x, slice(0)), rows(self.y, slice(0))
        few.split = [np.arange(0) for _ in self.split]
        return few

    def with_samples(self, numbers: Sequence[int], x: Samples, y: Samples) -> "Clients":
        """Add the samples of these clients, given one client after the other."""
        more, begin = copy.copy(self), count(self.x)
        more.x, more.y, more.split = joined(self.x, x), joined(self.y, y), list(self.split)
        for client in numbers:
            more.split[client] = np.arange(begin, begin := begin + int(self.sizes[client]))
        return more


class Holdout:
    """Evaluation samples, in slices small enough for any device."""

    def __init__(self, data: Data, device: torch.device, dtype: torch.dtype, *, part: str = "test", slice_size: int = 2048) -> None:
        self.data, self.dtype, self.slice_size = data, dtype, slice_size
        self.x, self.y = data.resident(part, device, dtype)

    def __len__(self) -> int:
        return count(self.x)

    def slices(self) -> "Iterator[Holdout]":
        """The samples in several smaller objects, one per slice."""
        for x, y in zip(parts(self.x, self.slice_size), parts(self.y, self.slice_size), strict=True):
            piece = copy.copy(self)
            piece.x, piece.y = x, y
            yield piece

    def __iter__(self) -> Iterator[tuple[Samples, Samples]]:
        for x, y in zip(parts(self.x, self.slice_size), parts(self.y, self.slice_size), strict=True):
            yield self.data.inputs(clone(x), self.dtype), clone(y)  # a model or a loss may modify its inputs in place
