"""A linear layer for stacked sequences. On a GPU its float32 products run on tensor cores, each as three products in TF32.

The libraries compute float32 products of many small matrices on the ordinary cores, at a few percent of the speed.
"""

from typing import Any

import torch
from torch import Tensor

from .convolution import stackable


@torch.library.custom_op("mimicfl::product", mutates_args=())
def product(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """a [m, M, K] @ b [m, K, N]."""
    if not a.is_cuda or a.dtype != torch.float32:
        return a @ b
    from .matrix_product import multiply

    return multiply(a, b, precision)


@product.register_fake
def _(a: Tensor, b: Tensor, precision: str) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


Plain = stackable(product)


class Product(stackable(product)):  # type: ignore[misc]
    """The product; its gradients are products, too."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return Plain.apply(dy, b.mT, *ctx.how), Plain.apply(a.mT, dy, *ctx.how), None


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    """`F.linear` of a batch of sequences [B, ..., K]."""
    y: Tensor = Product.apply(input.flatten(0, -2), weight.t(), precision).unflatten(0, input.shape[:-1])
    return y if bias is None else y + bias
