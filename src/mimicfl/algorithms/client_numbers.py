"""Client numbers that host and device both know, so that neither waits for the other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def on_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """These numbers as a tensor on the device, which `on_host` reads without waiting for the device."""
    tensor = torch.from_numpy(numbers).to(device, non_blocking=True)
    if device.type != "cpu":
        tensor.known = numbers  # type: ignore[attr-defined]
    return tensor


def all_on_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """`on_device` for many arrays with one copy."""
    parts = list(on_device(np.concatenate(arrays), device).split([len(array) for array in arrays])) if arrays else []
    for part, array in zip(parts, arrays, strict=True):
        part.known = array
    return parts


def on_host(numbers: Any) -> np.ndarray:
    """Client numbers as an array, from a tensor, an array, a list or one number."""
    known = getattr(numbers, "known", None)
    return np.asarray(known if known is not None else numbers.cpu() if isinstance(numbers, Tensor) else numbers)
