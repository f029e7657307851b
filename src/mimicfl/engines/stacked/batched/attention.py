"""Attention for stacked clients. `vmap` would run the backward pass of PyTorch's own kernels client by client.

Short sequences in float32 have a CUDA kernel for each direction; all others are matrix products and a softmax, which `vmap` stacks.
"""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOST, WARPS, TOGETHER = 32, 4, 4  # keys and entries of a head; warps per block; queries at a time, at most


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


def is_short(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernels can compute this attention [B, H, L, E]."""
    (length, entries), keys = query.shape[-2:], key.shape[-2]
    same = query.ndim == 4 and key.shape == value.shape and query.shape[:-2] == key.shape[:-2] and entries == key.shape[-1]
    fits = max(length, keys, entries) <= MOST and entries % 4 == 0
    return query.is_cuda and query.dtype == key.dtype == value.dtype == torch.float32 and mask is None and same and fits


@torch.library.custom_op("mimicfl::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    """Attention [m, B, H, L, E], in the layout of the query."""
    out = torch.empty_like(query)
    _launch("attend", (query, key, value), (out,), causal, scale, query.shape[3] + 2 * key.shape[3], 1)
    return out


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    return torch.empty_like(query)


@torch.library.custom_op("mimicfl::attend_back", mutates_args=())
def attend_back(query: Tensor, key: Tensor, value: Tensor, dy: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, in their layouts."""
    out = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    _launch("attend_back", (query, key, value, dy), out, causal, scale, 2 * query.shape[3] + 2 * key.shape[3], 2)
    return out


@attend_back.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, dy: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class View(ctypes.Structure):
    """A tensor [clients, samples, heads, rows, entries], as attention.cu declares it."""

    _fields_ = [("data", ctypes.c_void_p), *[(name, ctypes.c_int64) for name in ("client", "sample", "head", "row")]]


def _launch(name: str, given: tuple[Tensor, ...], out: tuple[Tensor, ...], causal: bool, scale: float, held: int, scores: int) -> None:
    """`held` rows of a head, and `scores` rows of scores, are in the memory of a warp."""
    from ..cuda import launch

    query, key = given[:2]
    m, samples, heads, length, entries = query.shape
    given = tuple(x if x.stride(4) == 1 else x.contiguous() for x in given)
    keys, count = key.shape[3], m * samples * heads
    pitch = entries if entries // 4 % 2 else entries + 4
    constants = {"H": heads, "L": length, "S": keys, "E": entries, "SAMPLES": samples, "CAUSAL": int(causal)}
    views = [View(x.data_ptr(), *x.stride()[:4]) for x in (*given, *out)]
    shared = 4 * WARPS * (held * pitch + scores * TOGETHER * (-(-keys // 4) * 4))
    launch("attention", name, constants, -(-count // WARPS), 32 * WARPS, shared, [*views, ctypes.c_float(scale), ctypes.c_int(count)])


def _stacked(info: Any, in_dims: Any, given: tuple[Any, ...]) -> list[Tensor]:
    """Tensors with the clients first; a shared one is expanded."""
    return [x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in zip(given, in_dims, strict=False)]


class ShortAttentionBack(torch.autograd.Function):
    """The gradients of `ShortAttention`; `vmap` makes them one call for all clients."""

    apply: Any

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, dy: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        one, two, three = attend_back(query[None], key[None], value[None], dy[None], causal, scale)
        return one[0], two[0], three[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any) -> tuple[Any, Any]:
        return attend_back(*_stacked(info, in_dims, given[:4]), *given[4:]), (0, 0, 0)


class ShortAttention(torch.autograd.Function):
    """`F.scaled_dot_product_attention` [B, H, L, E] without a mask."""

    apply: Any

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
        return attend(query[None], key[None], value[None], causal, scale)[0]  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.how = inputs[3:]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any) -> tuple[Any, Any]:
        return attend(*_stacked(info, in_dims, given[:3]), *given[3:]), 0

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return *ShortAttentionBack.apply(*ctx.saved_tensors, dy, *ctx.how), None, None
