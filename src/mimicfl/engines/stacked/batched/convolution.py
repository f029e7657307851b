"""A `conv2d` that supports stacking: one call for all clients, each with its own weights.

Three operations (forward, input gradient, weight gradient), each with a rule for `vmap`. On a GPU they use Triton kernels: implicit
matrix products on tensor cores for wide layers and for bfloat16, direct convolutions for float32 layers with few channels. Elsewhere they
are grouped convolutions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

Ints = list[int]


WIDE = 16  # channels in and out from which float32 layers use tensor cores


def _wide(x: Tensor, channels: Sequence[int]) -> bool:
    return x.is_cuda and (x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and min(channels) >= WIDE))


def is_wide(model: nn.Module, device: torch.device, precision: str) -> bool:
    """Whether images are better stored channels last."""
    convolutions = [p for p in model.parameters() if p.requires_grad and p.ndim == 4]
    wide = any(p.dtype == torch.float32 and min(p.shape[:2]) >= WIDE for p in convolutions)
    return device.type == "cuda" and (precision == "bf16" or wide)


def by_pieces(model: nn.Module, device: torch.device, precision: str) -> bool:
    """Whether the clients' vectors have a layout of their own and are updated piece by piece: not if images are small."""
    return is_wide(model, device, precision) or (device.type == "cuda" and all(p.ndim < 4 for p in model.parameters()))


def _direct(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32


def _empty(x: Tensor, wide: bool, *shape: int) -> Tensor:
    """A new image [m, B, C, H, W], or a new weight [m, O, C, kh, kw]; channels last if wide."""
    if not wide:
        return x.new_empty(shape)
    a, b, c, h, w = shape
    return x.new_empty(a, b, h, w, c).permute(0, 1, 4, 2, 3)


@torch.library.custom_op("mimicfl::conv", mutates_args=())
def conv(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints, precision: str) -> Tensor:
    if _wide(x, w.shape[1:3]):
        from .implicit_gemm import convolve as convolve_wide

        return convolve_wide(x, w, stride, padding, dilation, precision)
    if _direct(x):
        from .kernels import convolve

        return convolve(x, w, stride, padding, dilation)
    return _ungrouped(F.conv2d(_grouped(x), w.flatten(0, 1), None, stride, padding, dilation, len(x)), len(x))


@conv.register_fake
def _(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints, precision: str) -> Tensor:
    sides = [(x.shape[3 + i] + 2 * padding[i] - dilation[i] * (w.shape[3 + i] - 1) - 1) // stride[i] + 1 for i in (0, 1)]
    return _empty(x, _wide(x, w.shape[1:3]), x.shape[0], x.shape[1], w.shape[1], *sides)


@torch.library.custom_op("mimicfl::conv_input", mutates_args=())
def conv_input(dy: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints, precision: str) -> Tensor:
    m, b = dy.shape[:2]
    if _wide(dy, w.shape[1:3]):
        from .implicit_gemm import convolve_back as convolve_back_wide

        return convolve_back_wide(dy, w, size, stride, padding, dilation, precision)
    if _direct(dy):
        from .kernels import convolve_back

        return convolve_back(dy, w, size, stride, padding, dilation)
    shape = (b, m * w.shape[2], *size)
    return _ungrouped(conv2d_input(shape, w.flatten(0, 1), _grouped(dy), stride, padding, dilation, m), m)


@conv_input.register_fake
def _(dy: Tensor, w: Tensor, size: Ints, stride: Ints, padding: Ints, dilation: Ints, precision: str) -> Tensor:
    return _empty(dy, _wide(dy, w.shape[1:3]), dy.shape[0], dy.shape[1], w.shape[2], *size)


@torch.library.custom_op("mimicfl::conv_weight", mutates_args=())
def conv_weight(x: Tensor, dy: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, precision: str) -> Tensor:
    if _wide(x, [x.shape[2], dy.shape[2]]):
        from .implicit_gemm import convolve_weights as convolve_weights_wide

        return convolve_weights_wide(x, dy, kernel, stride, padding, dilation, precision)
    if _direct(x):
        from .kernels import convolve_weights

        return convolve_weights(x, dy, kernel, stride, padding, dilation, precision)
    m, o, c = x.shape[0], dy.shape[2], x.shape[2]
    shape = (m * o, c, *kernel)
    found: Tensor = conv2d_weight(_grouped(x), shape, _grouped(dy), stride, padding, dilation, m)
    return found.view(m, o, c, *kernel)


@conv_weight.register_fake
def _(x: Tensor, dy: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, precision: str) -> Tensor:
    return _empty(x, _wide(x, [x.shape[2], dy.shape[2]]), x.shape[0], dy.shape[2], x.shape[2], *kernel)


def _grouped(x: Tensor) -> Tensor:
    """[m, B, C, ...] -> [B, m C, ...]: clients as groups of channels."""
    return x.transpose(0, 1).flatten(1, 2)


def _ungrouped(x: Tensor, m: int) -> Tensor:
    apart: Tensor = x.unflatten(1, (m, -1))
    return apart.transpose(0, 1).contiguous()


def _by_group(operation: Any, takes: Sequence[str], gives: str) -> Any:
    """Give an operation a last argument, the number of groups: they are folded into the clients. Kinds are "image" and "weight"."""

    def grouped(a: Tensor, b: Tensor, *how: Any) -> Tensor:
        *how, groups = how  # type: ignore[assignment]
        if groups == 1:
            return operation(a, b, *how)  # type: ignore[no-any-return]
        folded = [_fold(x, kind, groups) for x, kind in zip((a, b), takes, strict=True)]
        found = operation(*folded, *how).unflatten(0, (len(a), groups))
        return found.transpose(1, 2).flatten(2, 3) if gives == "image" else found.flatten(1, 2)  # type: ignore[no-any-return]

    return grouped


def _fold(x: Tensor, kind: str, groups: int) -> Tensor:
    """Images [m, B, g C, H, W] -> [m g, B, C, H, W], or weights [m, g O, C, kh, kw] -> [m g, O, C, kh, kw]."""
    apart: Tensor = x.unflatten(2, (groups, -1)).transpose(1, 2) if kind == "image" else x.unflatten(1, (groups, -1))
    return apart.flatten(0, 1)


def _stacked(operation: Any, info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    """Apply the operation to both tensors with the clients as the first dimension; a shared tensor is expanded, not copied."""
    pair = [t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0) for t, dim in zip(args[:2], in_dims[:2], strict=True)]
    return operation(*pair, *args[2:]), 0


def stackable(operation: Any) -> Any:
    """Make an autograd function of a stacked operation: unstacked, it runs a stack of one; under `vmap`, one call for all clients."""

    class Stackable(torch.autograd.Function):
        @staticmethod
        def forward(a: Tensor, b: Tensor, *how: Any) -> Tensor:
            return operation(a[None], b[None], *how)[0]  # type: ignore[no-any-return]

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(*inputs[:2])
            ctx.how = inputs[2:]

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
            return _stacked(operation, info, in_dims, *args)

    return Stackable


ConvInput = stackable(_by_group(conv_input, ("image", "weight"), "image"))
ConvWeight = stackable(_by_group(conv_weight, ("image", "image"), "weight"))


class Conv(stackable(_by_group(conv, ("image", "weight"), "image"))):  # type: ignore[misc]
    """The convolution; its gradients are the other two operations."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = ConvInput.apply(dy, w, list(x.shape[-2:]), *ctx.how)
        dw = ConvWeight.apply(x, dy, list(w.shape[-2:]), *ctx.how)
        return dx, dw, *[None] * len(ctx.how)
