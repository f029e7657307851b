"""CUDA kernels of the stacked engines, compiled for the shapes of a model when they are first used."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...native.gpu.cuda import Kernels

HERE = Path(__file__).parent
Constants = dict[str, int]


@functools.cache
def _kernels(file: str, constants: tuple[tuple[str, int], ...], device: torch.device) -> Kernels:
    defined = "".join(f"#define {name} {int(value)}\n" for name, value in constants)
    return Kernels(defined + (HERE / f"{file}.cu").read_text(), device)


def launch(file: str, name: str, constants: Constants, blocks: int, threads: int, shared: int, arguments: list[Any]) -> None:
    """Launch a kernel of a file on the current stream. The arguments are tensors on one device, or ctypes values."""
    device = torch.device("cuda", torch.cuda.current_device())
    given = [ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else each for each in arguments]
    _kernels(file, tuple(constants.items()), device).launch(name, blocks, threads, shared, given)
