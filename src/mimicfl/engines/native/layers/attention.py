"""Attention over short sequences: the heads of all samples fill the lanes of a vector."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...torch_overrides import attention_call
from .kinds import Call, Functions, Kind, at, check_memory, fits, images, plain
from .linear import multiply, parameter_gradients

MOST = 2048  # entries of a head's scores, or of its queries: the workspace of 16 heads must fit into the second-level cache
MOST_FEATURES = 32  # per head: with more, PyTorch is nearly as fast
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


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    *others: Any,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    is_causal: bool = False,
    **_: Any,
) -> Call | None:
    """Return the call of `nn.MultiheadAttention` if it is self-attention as above, without weights as a result. The names are PyTorch's.

    PyTorch takes about fifty calls for it in each direction, most of which only change shapes.
    """
    if not (query is key is value) or need_weights or key_padding_mask is not None or (attn_mask is not None and not is_causal):
        return None
    if use_separate_proj_weight or add_zero_attn or (dropout_p and training) or others:
        return None
    if any(each is not None for each in (bias_k, bias_v, static_k, static_v)):
        return None
    if not plain(query) or query.ndim != 3 or not query.numel() or torch.is_autocast_enabled("cpu") or in_proj_weight is None:
        return None
    positions, width = query.shape[0], query.shape[2]
    features = width // num_heads
    parts = ((in_proj_weight, in_proj_bias, 3 * width), (out_proj_weight, out_proj_bias, width))
    if not all(plain(w) and w.shape == (outputs, width) and w.is_contiguous() and fits(bias, w) for w, bias, outputs in parts):
        return None
    if width != embed_dim_to_check or features * num_heads != width:
        return None
    if features > MOST_FEATURES or positions * max(positions, features) > MOST:
        return None

    tensors = (in_proj_weight, out_proj_weight, in_proj_bias, out_proj_bias)

    def run(functions: Functions, _: object) -> tuple[Tensor, None]:
        x = query.transpose(0, 1)
        swapped = x.is_contiguous()  # the samples come first in memory
        y: Tensor = SelfAttention.apply(x if swapped else query, *tensors, num_heads, bool(is_causal), swapped, functions)
        y = y.view(x.shape if swapped else query.shape)
        return y.transpose(0, 1) if swapped else y, None

    return Call(("Attention", (num_heads, positions, positions, features, int(is_causal))), run)


CALLS = {F.scaled_dot_product_attention: attention, F.multi_head_attention_forward: multi_head_attention}


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


class SelfAttention(torch.autograd.Function):
    """Self-attention of x, [B, L, D] if the samples come first and [L, B, D] if not, with its projections. The result is a matrix."""

    apply: Any

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        w_out: Tensor,
        bias: Tensor | None,
        bias_out: Tensor | None,
        heads: int,
        causal: bool,
        samples_first: bool,
        functions: Functions,
    ) -> Tensor:
        rows, width = x.reshape(-1, x.shape[2]), x.shape[2]
        samples = x.shape[0 if samples_first else 1]
        projected = multiply(rows, w, bias)  # queries, keys and values side by side
        mixed = torch.empty_like(rows, memory_format=torch.contiguous_format)
        places = _Places(samples, len(rows) // samples, width, heads, samples_first)
        scale = float((width // heads) ** -0.5)
        check_memory(functions[0](*places.of(projected), at(mixed), places.strides(3, 1), scale, samples * heads))
        ctx.save_for_backward(x, w, w_out, bias, bias_out, projected, mixed)
        ctx.settings = causal, scale, places, functions
        return multiply(mixed, w_out, bias_out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w, w_out, bias, bias_out, projected, mixed = ctx.saved_tensors
        causal, scale, places, functions = ctx.settings
        needs, nothing = ctx.needs_input_grad, (None,) * 4
        if torch.is_grad_enabled():  # create_graph: the gradient will be differentiated
            inputs = (x, w, w_out, bias, bias_out)
            wanted = [each for each, need in zip(inputs, needs, strict=False) if need]
            found = iter(torch.autograd.grad(_self_attention(*inputs, places, causal), wanted, dy, create_graph=True))
            return *(next(found) if need else None for need in needs[:5]), *nothing
        dy = dy.contiguous()
        dw_out, db_out = parameter_gradients(dy, mixed, needs[2], needs[4])
        if not (needs[0] or needs[1] or needs[3]):
            return None, None, dw_out, None, db_out, *nothing
        d_mixed, d_projected = multiply(dy, w_out.t()), torch.empty_like(projected)
        tensors = (*places.of(projected), at(d_mixed), *places.of(d_projected))
        check_memory(functions[1](*tensors, places.strides(3, 1, 3), scale, places.samples * places.heads))
        dx = multiply(d_projected, w.t()).view(x.shape) if needs[0] else None
        dw, db = parameter_gradients(d_projected, x.reshape(-1, x.shape[2]), needs[1], needs[3])
        return dx, dw, dw_out, db, db_out, *nothing


@dataclass(frozen=True)
class _Places:
    """Where the heads lie in a matrix with a row per sample and position."""

    samples: int
    positions: int
    width: int
    heads: int
    samples_first: bool

    def of(self, projected: Tensor) -> list[int]:
        """Return the addresses of queries, keys and values."""
        return [projected.data_ptr() + k * self.width * projected.element_size() for k in range(3)]

    def strides(self, *kinds: int) -> Any:
        """Return the strides of sample, head and position, in C. 3 means queries, keys and values, 1 a matrix of their width."""
        found = []
        for parts in kinds:
            row = parts * self.width
            sample, position = (self.positions * row, row) if self.samples_first else (row, self.samples * row)
            found += parts * [sample, self.width // self.heads, position]
        return (ctypes.c_int64 * len(found))(*found)


def _self_attention(x: Tensor, w: Tensor, w_out: Tensor, bias: Any, bias_out: Any, places: _Places, causal: bool) -> Tensor:
    """Compute the result with PyTorch operations, which can be differentiated twice."""
    x = x if places.samples_first else x.transpose(0, 1)
    q, k, value = (each.unflatten(2, (places.heads, -1)).transpose(1, 2) for each in F.linear(x, w, bias).chunk(3, 2))
    scores = q @ k.mT * q.shape[3] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    y = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    return F.linear(y if places.samples_first else y.transpose(0, 1), w_out, bias_out).flatten(0, 1)


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
