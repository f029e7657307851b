"""All clients' samples, once, on the training device; a client is a list of row numbers."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .dataset import Data, crop_and_flip


class Clients:
    """The population's training data as the engines see it."""

    def __init__(self, data: Data, split: list[np.ndarray], device: torch.device, dtype: torch.dtype) -> None:
        self.data, self.split, self.device, self.dtype = data, split, device, dtype
        self.x, self.y = data.resident("train", device, dtype)
        self.sizes = np.array([len(part) for part in split])  # [N]

    def __len__(self) -> int:
        return len(self.split)

    def batches(self, client: int, order: np.ndarray, sizes: list[int], moves: np.ndarray | None) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one local training: `order` numbers the client's samples, cut into pieces of `sizes`."""
        rows = torch.from_numpy(self.split[client][order]).to(self.device).split(sizes)
        shifts = [None] * len(sizes) if moves is None else torch.from_numpy(moves).to(self.device).split(sizes)
        for batch, shift in zip(rows, shifts, strict=True):
            x = self.x[batch]
            if shift is not None:
                x = crop_and_flip(x, shift)
            yield self.data.inputs(x, self.dtype), self.y[batch]


class Holdout:
    """Samples to evaluate on, in slices small enough for any device."""

    def __init__(self, data: Data, device: torch.device, dtype: torch.dtype, *, part: str = "test", slice_size: int = 2048) -> None:
        self.data, self.dtype, self.slice_size = data, dtype, slice_size
        self.x, self.y = data.resident(part, device, dtype)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in zip(self.x.split(self.slice_size), self.y.split(self.slice_size), strict=True):
            yield self.data.inputs(x.clone(), self.dtype), y.clone()  # a model or a loss may write to what it is given
