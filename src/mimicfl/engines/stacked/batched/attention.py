"""Attention as matrix products and a softmax. `vmap` stacks these; the backward pass of PyTorch's own kernels it runs client by client."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def attention(
    query: Tensor,  # [..., H, L, E]
    key: Tensor,  # [..., H, S, E]
    value: Tensor,  # [..., H, S, V]
    mask: Tensor | None,
    dropout: Callable[[Tensor], Tensor],
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """`F.scaled_dot_product_attention`; `grouped` shares each key and value among several heads."""
    if grouped:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return dropout(scores.softmax(dim=-1)) @ value
    scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    nothing = (scores == -math.inf).all(dim=-1, keepdim=True)  # a position that may attend to no other has the output zero
    weights = torch.where(nothing, 0.0, torch.where(nothing, 0.0, scores).softmax(dim=-1))
    return dropout(weights) @ value
