"""What a compiled layer is: its C++ functions, and how a PyTorch call is recognised as one of it."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_overrides import pair

Shape = tuple[str, tuple[int, ...]]  # a struct of the C++ headers and its template arguments
Functions = tuple[Any, ...]  # the compiled functions of a shape


@dataclass(frozen=True)
class Kind:
    """A struct of the C++ headers whose functions take pointers, then `numbers` floats, then counts."""

    functions: tuple[tuple[str, int, int], ...]  # name, number of pointers and number of counts
    numbers: int = 0
    fails: bool = False  # whether they return 1 if they could not allocate memory

    def export(self, struct: str, template: tuple[int, ...], prefix: str) -> str:
        """Return C++ code that makes the functions of one shape visible under this prefix."""
        layer, lines = f"{struct}<{', '.join(map(str, template))}>", []
        for name, pointers, counts in self.functions:
            kinds = ["void*"] * pointers + ["float"] * self.numbers + ["int64_t"] * counts
            given = ", ".join(f"{kind} a{k}" for k, kind in enumerate(kinds))
            passed = ", ".join(f"any(a{k})" if kind == "void*" else f"a{k}" for k, kind in enumerate(kinds))
            result = "int" if self.fails else "void"
            lines.append(f'extern "C" {result} {prefix}_{name}({given}) {{ return {layer}::{name}({passed}); }}')
        return "\n".join(lines)

    def load(self, code: ctypes.CDLL, prefix: str) -> Functions:
        found = tuple(getattr(code, f"{prefix}_{name}") for name, *_ in self.functions)
        for function, (_, pointers, counts) in zip(found, self.functions, strict=True):
            function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_float] * self.numbers + [ctypes.c_int64] * counts
        return found


# A pointer of any type.
HEADER = "struct any { void* p; any(void* p) : p(p) {} template <typename T> operator T*() const { return (T*)p; } };"


@dataclass(frozen=True)
class Product:
    """The latest product x w' + bias with many outputs, w [outputs, features]."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    outputs: list[Tensor]  # the result and its views
    versions: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, w: Tensor, bias: Tensor | None, z: Tensor) -> "Product":
        return cls(x, w, bias, [z], _versions(x, w, bias, z))

    def is_result(self, z: Tensor) -> bool:
        """Return whether z is the result, nothing has changed since, and no hook waits for the gradient of z."""
        waiting = any(out._backward_hooks or out.retains_grad for out in self.outputs)
        unchanged = _versions(self.x, self.w, self.bias, z) == self.versions
        return unchanged and not waiting and any(out is z for out in self.outputs)


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return how often each tensor has been changed in place; views count with the tensor that they show."""
    return tuple(0 if tensor is None else tensor._version for tensor in tensors)


@dataclass
class Memory:
    """What later calls know about earlier ones."""

    product: Product | None = None


@dataclass(frozen=True)
class Call:
    """A PyTorch call that another function can replace; without a shape, nothing is compiled for it."""

    shape: Shape | None
    run: Callable[[Functions, Memory], Any]


def two(value: Any) -> tuple[int, ...] | None:
    """Return a size as two integers; None if it is not one or two integers."""
    if isinstance(value, (tuple, list)) and not (len(value) in (1, 2) and all(type(number) is int for number in value)):
        return None
    return pair(value) if isinstance(value, (tuple, list)) or type(value) is int else None


def images(x: Any) -> bool:
    return plain(x) and x.ndim == 4 and x.numel() > 0 and not torch.is_autocast_enabled("cpu")


def plain(x: Any) -> bool:
    """Return whether it is an ordinary float32 tensor in CPU memory."""
    return ordinary(x) and x.dtype == torch.float32


def ordinary(x: Any) -> bool:
    """Return whether it is an ordinary tensor in CPU memory."""
    return type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" and x.layout == torch.strided and not x.is_neg()


def fits(bias: Any, w: Tensor) -> bool:
    """Return whether a layer's bias is None or has one number per output; PyTorch also accepts other shapes for some layers."""
    return bias is None or (plain(bias) and bias.shape == w.shape[:1])


def channels_last(x: Tensor) -> bool:
    """Return whether images are stored in channels-last layout; a single channel fits both layouts, so its stride decides."""
    return x.is_contiguous(memory_format=torch.channels_last) and (not x.is_contiguous() or x.stride(1) == 1)


def at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("a compiled layer could not allocate its workspace")
