"""A `group_norm` that keeps the layout of its input: PyTorch's rule for `vmap` copies channels-last images.

The sums are taken in float32, whatever the precision of the model. The backward pass uses the closed form, one pass of sums, so that a
compiler can fuse everything with what comes before and after.
"""

from typing import Any

import torch
from torch import Tensor


class Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) over all dimensions from `first` on; mean and inverse deviation are also returned."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, first: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        dims = tuple(range(first, x.ndim))
        mean = x.mean(dims, keepdim=True)
        inverse = ((x - mean).square().mean(dims, keepdim=True) + eps).rsqrt()
        return (x - mean) * inverse, mean, inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, first, _ = inputs
        ctx.dims = tuple(range(first, x.ndim))
        ctx.save_for_backward(x, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        x, mean, inverse = ctx.saved_tensors
        y = (x - mean) * inverse
        return (dy - dy.mean(ctx.dims, keepdim=True) - y * (dy * y).mean(ctx.dims, keepdim=True)) * inverse, None, None


def group_norm(input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """The same as `torch.nn.functional.group_norm`."""
    apart = input.float() if input.dtype == torch.bfloat16 else input
    y = Normalize.apply(apart.unflatten(1, (num_groups, -1)), 2, eps)[0].flatten(1, 2)  # type: ignore[no-untyped-call]
    channels = (-1, *[1] * (input.ndim - 2))
    y = y if weight is None else y * weight.view(channels)
    y = y if bias is None else y + bias.view(channels)
    return y.to(input.dtype)  # type: ignore[no-any-return]
