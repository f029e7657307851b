"""Convolutions of small images, and 3x3 convolutions by Winograd's algorithm."""

from typing import Any

import torch
from torch import Tensor

from ...torch_overrides import conv2d_call
from ..channels_last import CHANNELS
from .kinds import Call, Functions, Kind, Memory, at, channels_last, check_memory, fits, images, plain, two

MOST_CHANNELS = 32  # with more channels PyTorch's blocked products are faster, except than Winograd's
MOST_WEIGHTS = 512 * 512  # pairs of channels of a Winograd convolution: transformed weights take four times the memory
FEWEST_OUTPUTS = 16  # per channel: the outputs of one tile
PAIRS_PER_PIXEL = 200  # pairs of channels per output pixel of a batch, above which PyTorch is fastest, and that in its default layout
LAYOUTS = torch.contiguous_format, torch.channels_last
KINDS = dict.fromkeys(("Convolution", "ChannelsLast"), Kind((("forward", 4, 1), ("backward", 6, 1)), fails=True))


def convolution(*args: Any, **kwargs: Any) -> Call | None:
    """Return the call; None if our kernels do not support it or are not faster, or if PyTorch refuses it."""
    x, w, bias, stride, padding, dilation, groups = conv2d_call(*args, **kwargs)
    if not images(x) or not plain(w) or w.ndim != 4 or groups != 1 or two(dilation) != (1, 1):
        return None
    if not fits(bias, w):
        return None
    stride, padding, kernel = two(stride), two(padding), tuple(w.shape[2:])
    if not (stride and padding) or min(*stride, *w.shape) < 1 or min(padding) < 0 or w.shape[1] != x.shape[1]:
        return None
    if any(k > side + 2 * p for k, side, p in zip(kernel, x.shape[2:], padding, strict=True)):
        return None
    numbers = (*x.shape[1:], w.shape[0], *kernel, *stride, *padding)
    height, width = ((side + 2 * p - k) // s + 1 for side, p, k, s in zip(x.shape[2:], padding, kernel, stride, strict=True))
    few = kernel == (3, 3) and w.shape[0] * w.shape[1] > PAIRS_PER_PIXEL * len(x) * height * width
    if kernel == (3, 3) and stride == (1, 1) and _winograd(w, height * width):

        def run(functions: Functions, _: Memory) -> Tensor:
            return _in_default_layout(x, w, bias, stride, padding) if few else Conv.apply(x, w, bias, numbers, functions, True)

        return Call(("ChannelsLast", numbers), run)
    if channels_last(x):  # PyTorch is fast in that layout, and the layers that follow keep it
        return Call(None, lambda *_: _in_default_layout(x, w, bias, stride, padding)) if few else None
    if max(w.shape[:2]) > MOST_CHANNELS:
        return None
    return Call(("Convolution", numbers), lambda functions, _: Conv.apply(x, w, bias, numbers, functions, False))


CALLS = {torch.conv2d: convolution}


def _winograd(w: Tensor, outputs: int) -> bool:
    return all(n % CHANNELS == 0 for n in w.shape[:2]) and w.shape[0] * w.shape[1] <= MOST_WEIGHTS and outputs >= FEWEST_OUTPUTS


def _in_default_layout(x: Tensor, w: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: tuple[int, ...]) -> Tensor:
    """Run PyTorch's convolution on images [B, channels, height, width]; the result keeps their layout."""
    y = torch.conv2d(x.contiguous(), w, bias, stride, padding)
    return y.contiguous(memory_format=torch.channels_last) if channels_last(x) else y


class Conv(torch.autograd.Function):
    """A convolution with a compiled shape; `last`: compiled for channels-last layout. Results keep the layout of the images.

    As in PyTorch: a model may view its images as rows, which fails in the other layout.
    """

    apply: Any

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, numbers: tuple[int, ...], functions: Functions, last: bool
    ) -> Tensor:
        _, h, w, channels, kh, kw, sh, sw, ph, pw = numbers
        ctx.save_for_backward(x, weight)  # the originals, not the copies below, because second derivatives need them
        ctx.numbers, ctx.functions, ctx.biased = numbers, functions, bias is not None
        ctx.layout, ctx.given = layout, given = LAYOUTS[last], LAYOUTS[channels_last(x)]
        x, weight, bias = x.contiguous(memory_format=layout), weight.contiguous(), None if bias is None else bias.contiguous()
        shape = (len(x), channels, (h + 2 * ph - kh) // sh + 1, (w + 2 * pw - kw) // sw + 1)
        y = torch.empty(shape, dtype=x.dtype, memory_format=layout)
        check_memory(functions[0](at(x), at(weight), at(bias), at(y), len(x)))
        return y.contiguous(memory_format=given)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradient will be differentiated
            stride, padding, biases = ctx.numbers[6:8], ctx.numbers[8:], [len(weight)] if ctx.biased else None
            settings = (biases, stride, padding, (1, 1), False, (0, 0), 1, (True, True, ctx.biased))
            return *torch.ops.aten.convolution_backward(dy, x, weight, *settings), None, None, None
        x, weight, dy = x.contiguous(memory_format=ctx.layout), weight.contiguous(), dy.contiguous(memory_format=ctx.layout)
        dx = torch.empty(x.shape, dtype=x.dtype, memory_format=ctx.layout) if ctx.needs_input_grad[0] else None
        dw, db = x.new_empty(weight.shape), x.new_empty(len(weight)) if ctx.biased else None
        check_memory(ctx.functions[1](at(x), at(weight), at(dy), at(dx), at(dw), at(db), len(x)))
        return None if dx is None else dx.contiguous(memory_format=ctx.given), dw, db, None, None, None
