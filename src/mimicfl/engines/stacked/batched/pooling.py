"""A `max_pool2d` that keeps channels-last images, for windows that do not overlap.

PyTorch's gradient of pooling stores the positions as 64-bit numbers and is a kernel of its own. This one consists of simple operations,
which a compiler fuses with the activation before it, forward and backward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MOST = 16  # places of a window


class MaxPool(torch.autograd.Function):
    """The largest entry of every window [kh, kw] of x [..., C, H, W], and its place; the first of equals, as in PyTorch."""

    generate_vmap_rule = True
    apply: Any

    @staticmethod
    def forward(x: Tensor, kh: int, kw: int) -> tuple[Tensor, Tensor]:
        high, wide = (n // k for n, k in zip(x.shape[-2:], (kh, kw), strict=True))
        y = x[..., : kh * high : kh, : kw * wide : kw]
        place = torch.zeros_like(y, dtype=torch.uint8)
        for n in range(1, kh * kw):
            other = x[..., n // kw : kh * high : kh, n % kw : kw * wide : kw]
            better = (other > y) | other.isnan()
            y, place = torch.where(better, other, y), torch.where(better, n, place)
        return y, place

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.kh, ctx.kw = inputs
        ctx.rest = [n % k for n, k in zip(x.shape[-2:], inputs[1:], strict=True)]
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> Any:
        (place,) = ctx.saved_tensors
        here = torch.arange(ctx.kh * ctx.kw, device=dy.device, dtype=torch.uint8).view(ctx.kh, 1, ctx.kw, 1)
        dy, place = (t.movedim(-3, -1)[..., :, None, :, None, :] for t in (dy, place))  # channels last
        dx = torch.where(place == here, dy, 0.0).flatten(-3, -2).flatten(-4, -3)
        return F.pad(dx, (0, 0, 0, ctx.rest[1], 0, ctx.rest[0])).movedim(-1, -3) if any(ctx.rest) else dx.movedim(-1, -3), None, None


def max_pool(x: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """`F.max_pool2d(x, kernel)` of x [B, C, H, W]."""
    return MaxPool.apply(x, *kernel)[0]  # type: ignore[no-any-return]
