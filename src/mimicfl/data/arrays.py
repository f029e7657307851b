"""Turns arrays given by the user into tensors and arrays that the package owns."""

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, first_line, number, plain, shown

# Tensors held by a Data. Another Data may share them, since both detect changes; all other tensors are copied.
_HELD: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()


def own(value: Any, name: str) -> Tensor:
    """A contiguous CPU tensor that shares no memory with the caller's array; a tensor of a Data is returned as it is."""
    if isinstance(value, Tensor):
        tensor = value if _HELD.get(id(value)) is value else _copied(value, name)
    else:
        tensor = _from_array(value, name)
    if tensor.ndim == 0:
        raise UsageError(f"{name} must have one entry per sample, got a single number")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise UsageError(f"{name} holds values that are not finite; clean the data first")
    return tensor


def hold(tensor: Tensor) -> Tensor:
    _HELD[id(tensor)] = tensor
    return tensor


def _copied(value: Tensor, name: str) -> Tensor:
    wanted = f"{name} must be a dense tensor of real numbers"
    if value.is_meta:
        raise UsageError(f"{wanted}, got one on the meta device, which holds no values")
    if value.layout != torch.strided or value.is_complex() or value.is_quantized or value.is_nested:
        raise UsageError(f"{wanted}, got {value.dtype} in layout {value.layout}")
    try:
        return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UsageError(f"{wanted} whose values can be read: {first_line(error)}") from None


def _from_array(value: Any, name: str) -> Tensor:
    wanted = f"{name} must be a tensor or an array of numbers of one shape"
    if np.ma.isMaskedArray(value):
        raise UsageError(f"{wanted}, got a masked array: its masked entries would be used; fill or drop them first")
    try:
        array = np.asarray(value)
    except Exception as error:  # whatever an object's own conversion raises
        raise UsageError(f"{wanted}: {first_line(error)}") from None
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{wanted}, got {array.dtype}")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise UsageError(f"{name} must fit into int64, got numbers above {np.iinfo(np.int64).max:,}")
        array = array.astype(np.int64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def labels_of(values: Any, name: str) -> np.ndarray:
    """A copy of labels or ids as an array of numbers or strings."""
    try:
        array = np.array(values.detach().cpu().numpy() if isinstance(values, Tensor) else values)
        array = np.array(array.tolist()) if array.dtype.kind == "O" else array
    except Exception:  # whatever an object's own conversion raises
        raise UsageError(f"{name} must be an array of numbers or strings, got {shown(values)}") from None
    if array.dtype.kind not in "biufUS" or np.ma.isMaskedArray(values):
        raise UsageError(f"{name} must be an array of numbers or strings without masks, got {type(values).__name__} of {array.dtype}")
    return array


def channels(name: str, value: Any, count: int) -> tuple[float, ...]:
    """One number, or one per channel."""
    given = plain(value)
    numbers = tuple(number(name, each) for each in (given if isinstance(given, (list, tuple)) else [given]))
    if len(numbers) not in (1, count):
        raise UsageError(f"{name} must have one value, or one per channel ({count}), got {len(numbers)}")
    return numbers


def optimum_of(value: Any) -> Tensor | None:
    if value is None:
        return None
    tensor = own(value, "optimum")
    if tensor.ndim != 1 or not tensor.is_floating_point() or not len(tensor):
        raise UsageError(f"optimum must be a vector of real numbers, one per parameter, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor
