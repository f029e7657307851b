"""Augmentation of training batches: random crops and flips of images, and the user's own transform."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, first_line
from .samples import Samples, count, tensors

CROP_PADDING = 4  # pixels of black border around an image before a random crop, as usual for CIFAR-10
Transform = Callable[[Any, torch.Generator], Any]


def crop_and_flip(x: Tensor, moves: Tensor) -> Tensor:
    """Crop and flip each image [B, C, H, W] by its row of `moves` [B, 3]: offsets down and right, and 1 to mirror. The border is black."""
    b, c, h, w = x.shape
    padded = torch.nn.functional.pad(x, [CROP_PADDING] * 4)
    rows = moves[:, :1] + torch.arange(h, device=x.device)  # [B, H]
    columns = torch.arange(w, device=x.device).expand(b, w)
    columns = moves[:, 1:2] + torch.where(moves[:, 2:] > 0, w - 1 - columns, columns)  # [B, W]
    image = torch.arange(b, device=x.device)[:, None, None, None]
    channel = torch.arange(c, device=x.device)[None, :, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def random_moves(count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw crop offsets and flips for `count` images, [count, 3]."""
    moves = rng.integers(0, 2 * CROP_PADDING + 1, size=(count, 3))
    moves[:, 2] = rng.integers(0, 2, size=count)
    return moves


def transformed(transform: Transform, x: Samples, generator: torch.Generator) -> Samples:
    """Apply a user's transform to a batch of model inputs, and check what it returns."""
    samples = count(x)
    found = transform(x, generator)
    if type(found) is not type(x) or not all(isinstance(each, Tensor) for each in tensors(found)):
        raise UsageError(f"transform must return a {type(x).__name__} of inputs, like the batch it received, got {type(found).__name__}")
    if count(found) != samples:
        raise UsageError(f"transform must keep the number of samples in a batch, got {count(found)} for {samples}")
    return found


def check_transform(transform: Transform, x: Samples) -> Samples:
    """Try a transform on a batch before training, and return the transformed batch."""
    try:
        return transformed(transform, x, torch.Generator(tensors(x)[0].device))
    except UsageError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UsageError(f"transform fails on a batch of training samples: {first_line(error)}") from error
