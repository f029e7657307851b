"""The update of many lanes by SGD in one kernel, for gradients that lie in separate tensors."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from . import launch

MOST = 96  # pieces per launch, whose table is an argument of the kernel
THREADS, CHUNK = 256, 4096  # as in move.cu
VECTORS = ("w", "g", "half", "shift", "start", "origin", "k", "steps", "eta", "mu")


class Piece(ctypes.Structure):
    """A piece of the gradients, as move.cu declares it."""

    _fields_ = [
        ("h", ctypes.c_void_p), ("row", ctypes.c_int64),
        *[(name, ctypes.c_int32) for name in ("begin", "size", "first", "wide")],
    ]  # fmt: skip


class Vectors(ctypes.Structure):
    """The lanes, as move.cu declares them."""

    _fields_ = [*[(name, ctypes.c_void_p) for name in VECTORS], ("row", ctypes.c_int64), ("lanes", ctypes.c_int32)]


def move(held: dict[str, Tensor | None], pieces: list[Tensor]) -> None:
    """Update lanes in place, given their gradients in consecutive pieces [lanes, n]; `held` are the lanes' tensors by name."""
    begin, w = 0, held["w"]
    assert w is not None
    for count in range(0, len(pieces), MOST):
        begin = _move(held, w, [h if h.stride(1) == 1 else h.contiguous() for h in pieces[count : count + MOST]], begin)


def _move(held: dict[str, Tensor | None], w: Tensor, pieces: list[Tensor], begin: int) -> int:
    table, first = (Piece * len(pieces))(), 0
    for entry, h in zip(table, pieces, strict=True):
        size = h.shape[1]
        wide = not (begin % 4 or size % 4 or h.stride(0) % 4 or h.data_ptr() % 16)
        entry.h, entry.row, entry.begin, entry.size, entry.first, entry.wide = h.data_ptr(), h.stride(0), begin, size, first, wide
        begin, first = begin + size, first + -(-size // CHUNK)
    addresses = {name: 0 if (tensor := held[name]) is None else tensor.data_ptr() for name in VECTORS}
    constants = {
        "COUNT": len(pieces),
        "GRADIENT": pieces[0].dtype == torch.bfloat16,
        **{flag: held[name] is not None for flag, name in (("SHIFT", "shift"), ("PROX", "mu"), ("HALF", "half"))},
    }
    arguments: list[Any] = [table, Vectors(**addresses, row=w.stride(0), lanes=len(w))]
    launch("move", "move", constants, first * len(w), THREADS, 0, arguments)
    return begin
