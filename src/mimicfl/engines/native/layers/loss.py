"""Cross-entropy with many classes, as in language models.

PyTorch writes five matrices of the outputs' size per step. Here the outputs are the only one: their gradient is computed for some classes
at a time, and the products with it follow while it is in the cache. For that, `Product` remembers which product the outputs are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .kinds import Call, Functions, Kind, Memory, Product, at, fits, ordinary, plain
from .linear import multiply, parameter_gradients

FEWEST_CLASSES = 64
FEWEST_OUTPUTS = 1024  # of a product that is remembered
AT_ONCE = 160_000  # entries of the gradient that are computed at a time: they fit into the second-level cache with their factors
KINDS = {"CrossEntropy": Kind((("forward", 5, 1), ("backward", 6, 3)))}
REDUCE: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda loss: loss, "mean": torch.mean, "sum": torch.sum}


def linear(known: Product | None, z: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product | None:
    """Remember z = input weight' + bias. The names are PyTorch's."""
    if not (plain(z) and plain(input) and plain(weight) and z.requires_grad) or torch.is_autocast_enabled("cpu"):
        return known
    if weight.ndim != 2 or len(weight) < FEWEST_OUTPUTS or not weight.is_contiguous() or not fits(bias, weight):
        return known
    return Product.of(input.reshape(-1, input.shape[-1]), weight, bias, z)


def product(known: Product | None, z: Any, x: Tensor, other: Tensor) -> Product | None:
    """Remember z = x @ other."""
    columns = isinstance(other, Tensor) and other.ndim == 2 and other.shape[1] >= FEWEST_OUTPUTS
    return linear(known, z, x, other.t()) if columns and isinstance(x, Tensor) and x.ndim >= 2 else known


def view(known: Product | None, z: Any, x: Tensor, *_: Any, **__: Any) -> Product | None:
    """Remember that z is the result seen as other rows of the same length."""
    if known and plain(z) and z.grad_fn is not None and any(x is out for out in known.outputs):  # under no_grad, views have no function
        rows = z.shape[-1:] == x.shape[-1:] and z.is_contiguous()
        if rows and z.data_ptr() == x.data_ptr() and z.numel() == x.numel():
            known.outputs.append(z)
    return known


TRACKED: dict[Any, Callable[..., Product | None]] = {
    F.linear: linear,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm), product),
    **dict.fromkeys((torch.flatten, torch.reshape, Tensor.flatten, Tensor.reshape, Tensor.view, Tensor.contiguous), view),
}


def track(known: Product | None, function: Any, z: Any, args: Any, kwargs: dict[str, Any]) -> Product | None:
    """Return the latest product, after this call of one of the functions above."""
    try:
        return TRACKED[function](known, z, *args, **kwargs)
    except TypeError:  # arguments by other names, such as `out`
        return known


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Call | None:
    """Return the call if all targets are classes that count equally. The names are PyTorch's."""
    if weight is not None or size_average is not None or reduce is not None or label_smoothing or reduction not in REDUCE:
        return None
    if not plain(input) or input.ndim != 2 or input.shape[1] < FEWEST_CLASSES or not len(input) or torch.is_autocast_enabled("cpu"):
        return None
    if not ordinary(target) or target.dtype != torch.long or target.shape != input.shape[:1]:
        return None
    low, high = (int(limit) for limit in torch.aminmax(target))
    if low < 0 or high >= input.shape[1] or (low <= ignore_index <= high and bool((target == ignore_index).any())):
        return None

    def run(functions: Functions, memory: Memory) -> Tensor:
        known, memory.product = memory.product, None  # its matrix is large: keep it no longer than needed
        if known and known.is_result(input):
            return REDUCE[reduction](CrossEntropy.apply(input.detach(), target, functions, known.x, known.w, known.bias))
        return REDUCE[reduction](CrossEntropy.apply(input, target, functions, None, None, None))

    return Call(("CrossEntropy", (input.shape[1],)), run)


CALLS = {F.cross_entropy: cross_entropy}


class CrossEntropy(torch.autograd.Function):
    """The loss of each row of outputs z; of z = x w' + bias if these are given, which then get the gradient instead of z."""

    apply: Any

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor, functions: Functions, x: Tensor | None, w: Tensor | None, bias: Tensor | None) -> Tensor:
        rows, y = z.contiguous(), y.contiguous()
        loss, most, total = (z.new_empty(len(z)) for _ in range(3))
        functions[0](at(rows), at(y), at(loss), at(most), at(total), len(z))
        ctx.save_for_backward(z, y, most, total, x, w, bias)
        ctx.functions = functions
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        z, y, most, total, x, w, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradient will be differentiated
            return _gradients(z, y, scale, x, w, bias)
        z, scale = z.contiguous(), scale.contiguous()

        def columns(begin: int, width: int) -> Tensor:
            dz: Tensor = z.new_empty(len(z), width)
            ctx.functions[1](at(z), at(y), at(most), at(total), at(scale), at(dz), begin, width, len(z))
            return dz

        if w is None:
            return columns(0, z.shape[1]), None, None, None, None, None
        x_needs, w_needs, bias_needs = ctx.needs_input_grad[3:]  # a frozen layer needs no gradient of its weights
        dx, dw = torch.zeros_like(x) if x_needs else None, torch.empty_like(w) if w_needs else None
        db = torch.empty_like(bias) if bias_needs else None
        width = max(64, AT_ONCE // len(z) // 64 * 64)
        for begin in range(0, len(w), width):
            here = slice(begin, min(begin + width, len(w)))
            dz = columns(begin, here.stop - begin)
            if dx is not None:
                dx += multiply(dz, w[here].t())
            _, sums = parameter_gradients(dz, x, w_needs, bias_needs, None if dw is None else dw[here])
            if db is not None and sums is not None:
                db[here] = sums
        return None, None, None, dx, dw, db


def _gradients(z: Tensor, y: Tensor, scale: Tensor, x: Tensor | None, w: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """Compute the gradients with PyTorch operations, which can be differentiated again."""
    if x is not None and w is not None:
        z = F.linear(x, w, bias)
    dz = (z.softmax(1) - F.one_hot(y, z.shape[1])) * scale[:, None]
    if x is None or w is None:
        return dz, None, None, None, None, None
    return None, None, None, dz @ w, dz.t() @ x, None if bias is None else dz.sum(0)
