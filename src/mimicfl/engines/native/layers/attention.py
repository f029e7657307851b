"""Attention over short sequences: the heads of all samples fill the lanes of a vector."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...torch_overrides import attention_call
from .kinds import Call, Functions, Kind, at, check_memory, images

MOST = 2048  # entries of a head's scores, or of its queries: the workspace of 16 heads must fit into the second-level cache
MOST_FEATURES = 16  # per head: with more, PyTorch's products are faster
KINDS = {"Attention": Kind((("forward", 5, 1), ("backward", 8, 1)), numbers=1, fails=True)}


def attention(*args: Any, **kwargs: Any) -> Call | None:
    """Return the call if it has no mask but the causal one, no dropout, and a scale above 0."""
    q, k, value, mask, dropout, causal, scale, grouped = attention_call(*args, **kwargs)
    if mask is not None or dropout or grouped or not all(images(x) for x in (q, k, value)):
        return None
    heads, queries, features = q.shape[1:]
    if k.shape != value.shape or k.shape[:2] != q.shape[:2] or k.shape[3] != features:
        return None
    keys = k.shape[2]
    if features > MOST_FEATURES or max(queries * keys, queries * features, keys * features) > MOST:
        return None
    numbers, scale = (heads, queries, keys, features, int(causal)), float(features**-0.5 if scale is None else scale)
    if not scale > 0:  # the kernel scales after it masked: 0 and negative numbers would undo it
        return None
    return Call(("Attention", numbers), lambda functions, _: Attention.apply(q, k, value, bool(causal), scale, functions))


CALLS = {F.scaled_dot_product_attention: attention}


class Attention(torch.autograd.Function):
    """Attention [B, heads, L, D] with a compiled shape. Results have the memory layout of the queries."""

    apply: Any

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, value: Tensor, causal: bool, scale: float, functions: Functions) -> Tensor:
        ctx.save_for_backward(q, k, value)
        ctx.settings = causal, scale, functions
        q, k, value = (_features_contiguous(x) for x in (q, k, value))
        y = _like(q)
        check_memory(functions[0](at(q), at(k), at(value), at(y), _distances(q, k, value, y), scale, q.shape[0] * q.shape[1]))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        causal, scale, functions = ctx.settings
        if torch.is_grad_enabled():  # create_graph: the gradient will be differentiated
            q, k, value = ctx.saved_tensors
            return *_gradients(q, k, value, dy, causal, scale), None, None, None
        q, k, value, dy = (_features_contiguous(x) for x in (*ctx.saved_tensors, dy))
        results = [_like(x) for x in (q, k, value)]
        tensors = (q, k, value, dy, *results)
        check_memory(functions[1](*map(at, tensors), _distances(*tensors), scale, q.shape[0] * q.shape[1]))
        return *results, None, None, None


def _features_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 and min(x.stride()) > 0 else x.contiguous()


def _like(x: Tensor) -> Tensor:
    """Return new memory with the layout of x, and contiguous features: if windows overlap, PyTorch may put another dimension last."""
    new = torch.empty_like(x)
    return new if new.stride(3) == 1 else x.new_empty(x.shape)


def _distances(*tensors: Tensor) -> Any:
    """The strides of sample, head and position of all tensors, in C."""
    strides = [x.stride(k) for x in tensors for k in range(3)]
    return (ctypes.c_int64 * len(strides))(*strides)


def _gradients(q: Tensor, k: Tensor, value: Tensor, dy: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients with PyTorch operations, which can be differentiated again."""
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    p = scores.softmax(-1)
    dp = dy @ value.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.mT @ q, p.mT @ dy
