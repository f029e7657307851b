"""Copies the user's arrays into tensors and arrays that nothing else can change, and checks splits."""

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError, first_line, integer, number, plain, shown

# Tensors that belong to a Data. Other Data objects may share them, since all detect changes; any other tensor is copied.
_HELD: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # stored as int64, as arrays of these types are
EXACT = 2**53  # up to here float64 holds every integer


def owned_tensor(value: Any, name: str) -> Tensor:
    """Copy an array into a contiguous CPU tensor; return a tensor that already belongs to a Data unchanged."""
    if isinstance(value, Tensor):
        tensor = value if _HELD.get(id(value)) is value else _copied(value, name)
    else:
        tensor = _from_array(value, name)
    if tensor.ndim == 0:
        raise UsageError(f"{name} must have one entry per sample, got a single number")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise UsageError(f"{name} holds values that are not finite; clean the data first")
    return tensor


def mark_as_held(tensor: Tensor) -> Tensor:
    """Record that a tensor belongs to a Data."""
    _HELD[id(tensor)] = tensor
    return tensor


def _copied(value: Tensor, name: str) -> Tensor:
    wanted = f"{name} must be a dense tensor of real numbers"
    if value.is_meta:
        raise UsageError(f"{wanted}, got one on the meta device, which holds no values")
    if value.layout != torch.strided or value.is_complex() or value.is_quantized or value.is_nested:
        raise UsageError(f"{wanted}, got {value.dtype} in layout {value.layout}")
    if value.dtype in UNSIGNED:
        return _from_array(value.detach().cpu().numpy(), name)
    # Few operations of PyTorch know numbers of one byte; float32 holds them exactly.
    dtype = torch.float32 if value.is_floating_point() and value.dtype.itemsize == 1 else value.dtype
    try:
        return torch.empty(value.shape, dtype=dtype).copy_(value.detach())
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UsageError(f"{wanted} whose values can be read: {first_line(error)}") from None


def _from_array(value: Any, name: str) -> Tensor:
    wanted = f"{name} must be a tensor or an array of numbers of one shape"
    if np.ma.isMaskedArray(value):
        raise UsageError(f"{wanted}, got a masked array, whose mask would be ignored; fill or drop the masked entries first")
    try:
        array = np.asarray(value)
    except Exception as error:  # the conversion of a custom object may raise anything
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
    """Return the bytes of a tensor, without a copy if it is contiguous."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def labels_of(values: Any, name: str) -> np.ndarray:
    """Copy labels or ids into an array of numbers or strings."""
    try:
        array = np.array(values.detach().cpu().numpy() if isinstance(values, Tensor) else values)
        array = np.array(array.tolist()) if array.dtype.kind == "O" else array
    except Exception:  # the conversion of a custom object may raise anything
        raise UsageError(f"{name} must be an array of numbers or strings, got {shown(values)}") from None
    if array.dtype.kind in "OUS":
        _check_strings(values, name)
    if array.dtype.kind not in "biufUS" or np.ma.isMaskedArray(values):
        raise UsageError(f"{name} must be an array of numbers or strings without masks, got {type(values).__name__} of {array.dtype}")
    if array.dtype.kind == "f" and not bool((np.abs(array) < EXACT).all()):  # nan, or integers of any size in a list with negative ones
        raise UsageError(f"{name} must be finite and, as real numbers, below 2^53, or different ones would be equal; give strings instead")
    return array


def _check_strings(values: Any, name: str) -> None:
    """NumPy turns numbers among strings into strings: nan would be a client of that name, and 1 the client "1"."""
    if getattr(getattr(values, "dtype", None), "kind", "O") in "US":
        return
    entries = np.asarray(values, dtype=object).reshape(-1).tolist()
    if any(map(is_missing, entries)):
        raise UsageError(f"{name} must have a value for every sample, but some are None or nan; fill them in or drop these samples")
    if len({next((kind for kind in (str, bytes) if isinstance(each, kind)), object) for each in entries}) > 1:
        raise UsageError(f"{name} must be an array of numbers or of strings, not of both; convert them first")


def is_missing(value: Any) -> bool:
    """Whether a value is None, nan, or pandas's mark for a missing one."""
    try:
        return value is None or bool(value != value)
    except TypeError:  # pandas.NA is neither true nor false
        return True
    except (ValueError, RuntimeError):  # an array or a tensor
        return False


def channels(name: str, value: Any, count: int) -> tuple[float, ...]:
    """Check a value that is one number or one number per channel."""
    given = plain(value)
    numbers = tuple(number(name, each) for each in (given if isinstance(given, (list, tuple)) else [given]))
    if len(numbers) not in (1, count):
        raise UsageError(f"{name} must have one value, or one per channel ({count}), got {len(numbers)}")
    return numbers


def optimum_of(value: Any) -> Tensor | None:
    if value is None:
        return None
    tensor = owned_tensor(value, "optimum")
    if tensor.ndim != 1 or not tensor.is_floating_point() or not len(tensor):
        raise UsageError(f"optimum must be a vector of real numbers, one per parameter, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor


def as_split(split: Any, samples: int, kind: str = "training samples", empty: bool = False) -> list[np.ndarray]:
    """Convert a split to a list of int64 index arrays. Checks that every index exists and, unless `empty`, that every client has data."""
    try:
        parts = list(split)
    except Exception:  # the iteration of a custom object may raise anything
        raise UsageError(f"split must be a list of arrays of sample numbers, one per client, got {shown(split)}") from None
    integer("the number of clients", len(parts))
    return [as_rows(part, samples, f"client {client}", kind, empty) for client, part in enumerate(parts)]


def as_rows(part: Any, samples: int, what: str, kind: str = "training samples", empty: bool = False) -> np.ndarray:
    """Convert sample numbers to an int64 array and check them."""
    try:
        rows = np.asarray(part)
    except Exception:  # the conversion of a custom object may raise anything
        raise UsageError(f"{what} must have a list of sample numbers, got {shown(part)}") from None
    if (rows.size and rows.dtype.kind not in "iu") or np.ma.isMaskedArray(part):
        raise UsageError(f"{what} must hold sample numbers, got {rows.dtype} (for a mask use np.flatnonzero)")
    if rows.ndim != 1:
        raise UsageError(f"{what} must have a list of sample numbers, got shape {rows.shape}")
    if rows.size == 0:
        if empty:
            return np.empty(0, dtype=np.int64)
        raise UsageError(f"{what} has no data: use fewer clients or another partition")
    if rows.min() < 0 or rows.max() >= samples:
        raise UsageError(f"{what} has a sample number outside the {samples} {kind}; was the split made for other data?")
    return rows.astype(np.int64)
