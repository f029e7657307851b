"""Linear layers through oneDNN on processors where PyTorch's default library uses half of their vector width.

PyTorch multiplies float32 matrices with Intel's MKL, which keeps to 256-bit instructions on other makers' processors. oneDNN, which PyTorch
uses for convolutions, takes the 512-bit ones wherever they exist. For the gradient of the weights a matrix must be copied first, so
with a few hundred rows a kernel of ours computes it.
"""

from ctypes import c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...capabilities import Unsupported
from ..build import load
from ..generate import header_text
from .kinds import Call, Kind, Memory, at, fits, plain

FEWEST_WEIGHTS = 8192
FEWEST_PRODUCTS = 2**21  # of two numbers: for smaller matrices MKL takes less time per call
# Sizes for which our own gradient of the weights is as fast as oneDNN's or faster.
MOST_ROWS, NARROW = 512, 128
FEWEST_OUTPUTS, FEWEST_INPUTS = 24, 16  # a tile of the kernel
KINDS: dict[str, Kind] = {}


@cache
def faster() -> bool:
    """Return whether oneDNN is the faster library for large matrices here."""
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512") and torch.backends.mkldnn.is_available()
    try:
        maker = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return wide and "AuthenticAMD" in maker and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a b' + bias for matrices."""
    if not faster():
        return F.linear(a, b, bias)
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")  # type: ignore[no-any-return]


def parameter_gradients(dy: Tensor, x: Tensor, weight: bool, bias: bool, out: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
    """Return dy' x, in `out` if that is given, and the sum of the rows of dy, each if it is wanted."""
    if not weight:
        return None, dy.sum(0) if bias else None
    outputs, inputs = dy.shape[1], x.shape[1]
    small = 0 < len(x) <= MOST_ROWS and outputs >= FEWEST_OUTPUTS and inputs >= FEWEST_INPUTS and min(outputs, inputs) <= NARROW
    if small and faster() and (kernel := compiled_gradients()):
        dy, x = dy.contiguous(), x.contiguous()
        dw = dy.new_empty(outputs, inputs) if out is None else out
        db = dy.new_empty(outputs) if bias else None
        kernel(at(dy), at(x), at(dw), at(db), len(x), outputs, inputs)
        return dw, db
    dw = _weight_gradient(dy, x)
    return dw if out is None else out.copy_(dw), dy.sum(0) if bias else None


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy' x. The factor with fewer columns comes first, which oneDNN multiplies faster."""
    if dy.shape[1] <= x.shape[1] or not faster():
        return multiply(dy.t(), x.t())
    return multiply(x.t(), dy.t()).t().contiguous()


@cache
def compiled_gradients() -> Any:
    """Return the compiled function for small matrices; None without a compiler."""
    try:
        function = load(header_text("vectors.h", "weight_gradient.h")).mimicfl_weight_gradient
    except Unsupported:
        return None
    function.argtypes, function.restype = [c_void_p] * 4 + [c_int64] * 3, None
    return function


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:
    """Return the call. The names are PyTorch's."""
    if not faster() or not all(plain(each) for each in (input, weight)) or torch.is_autocast_enabled("cpu"):
        return None
    if weight.ndim != 2 or weight.numel() < FEWEST_WEIGHTS or not weight.is_contiguous() or input.shape[-1:] != weight.shape[1:]:
        return None
    if not fits(bias, weight) or not (bias is None or bias.is_contiguous()):
        return None

    def run(_: object, __: Memory) -> Tensor:
        if input.numel() * len(weight) < FEWEST_PRODUCTS:
            return F.linear(input, weight, bias)
        y: Tensor = Linear.apply(input.reshape(-1, input.shape[-1]), weight, bias)
        return y if input.ndim == 2 else y.view(*input.shape[:-1], len(weight))

    return Call(None, run)


def product(input: Tensor, other: Tensor) -> Call | None:
    """Return input @ other as the call of a linear layer."""
    matrix = isinstance(other, Tensor) and other.ndim == 2 and isinstance(input, Tensor) and input.ndim >= 2
    return linear(input, other.t()) if matrix else None


CALLS: dict[Any, Any] = {F.linear: linear, **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm), product)}


class Linear(torch.autograd.Function):
    """x w' + bias for matrices. The result is not a view, because PyTorch refuses to change views of custom functions in place."""

    apply: Any

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.biased = bias is not None
        return multiply(x.contiguous(), w, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradient will be differentiated
            return dy @ w, dy.t() @ x, dy.sum(0) if ctx.biased else None
        x, dy = x.contiguous(), dy.contiguous()
        dx = multiply(dy, w.t()) if ctx.needs_input_grad[0] else None
        return dx, *parameter_gradients(dy, x, *ctx.needs_input_grad[1:])
