"""Max pooling of small images."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...torch_overrides import max_pool2d_call
from .kinds import Call, Functions, Kind, at, channels_last, images, two

FEWEST_CHANNELS = 16  # of images in channels-last layout: the lanes of a vector
KINDS = dict.fromkeys(("MaxPool", "MaxPoolLast"), Kind((("forward", 3, 1), ("backward", 3, 1))))


def max_pool(*args: Any, **kwargs: Any) -> Call | None:
    x, kernel_size, stride, padding, dilation, ceil_mode, return_indices = max_pool2d_call(*args, **kwargs)
    kernel, steps = two(kernel_size), two(kernel_size if stride is None or stride in ((), []) else stride)
    if not images(x) or ceil_mode or return_indices or two(padding) != (0, 0) or two(dilation) != (1, 1):
        return None
    if not (kernel and steps) or min(*kernel, *steps) < 1 or kernel[0] > x.shape[2] or kernel[1] > x.shape[3]:
        return None
    numbers, last = (*x.shape[2:], *kernel, *steps), channels_last(x)
    if last and x.shape[1] < FEWEST_CHANNELS:
        return None
    shape = ("MaxPoolLast", (x.shape[1], *numbers)) if last else ("MaxPool", numbers)
    return Call(shape, lambda functions, _: Pool.apply(x, numbers, functions, last))


CALLS = {F.max_pool2d: max_pool, torch.max_pool2d: max_pool}


class Pool(torch.autograd.Function):
    """Max pooling with a compiled shape. `last`: images, gradients and results are in channels-last layout."""

    apply: Any

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: tuple[int, ...], functions: Functions, last: bool) -> Tensor:
        h, w, kh, kw, sh, sw = numbers
        ctx.layout = layout = torch.channels_last if last else torch.contiguous_format
        ctx.numbers, ctx.functions, ctx.shape = numbers, functions, x.shape
        ctx.count = x.shape[0] if last else x.shape[0] * x.shape[1]
        x = x.contiguous(memory_format=layout)
        shape = (*x.shape[:2], (h - kh) // sh + 1, (w - kw) // sw + 1)
        y, place = (torch.empty(shape, dtype=dtype, memory_format=layout) for dtype in (x.dtype, torch.int32))
        functions[0](at(x), at(y), at(place), ctx.count)
        ctx.save_for_backward(place)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        [place] = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _scattered(dy, place, ctx.shape, ctx.numbers), None, None, None
        dy = dy.contiguous(memory_format=ctx.layout)
        dx = torch.empty(ctx.shape, dtype=dy.dtype, memory_format=ctx.layout)
        ctx.functions[1](at(dy), at(place), at(dx), ctx.count)
        return dx, None, None, None


def _scattered(dy: Tensor, place: Tensor, shape: torch.Size, numbers: tuple[int, ...]) -> Tensor:
    """Compute the gradient of max pooling with PyTorch operations, which can be differentiated again."""
    _, width, _, kw, sh, sw = numbers
    rows = torch.arange(dy.shape[2], device=dy.device)[:, None] * sh + place // kw
    columns = torch.arange(dy.shape[3], device=dy.device) * sw + place % kw
    index = (rows * width + columns).flatten(2)
    return dy.new_zeros(*shape[:2], shape[2] * width).scatter_add(2, index, dy.flatten(2)).view(shape)
