"""Triton kernels for the convolutions of many clients at once, each with its own weights.

In cuDNN this is a grouped convolution with very few channels per group, which runs at a fraction of the GPU's speed. These kernels
neither unfold the inputs in memory nor use atomic additions, so the same inputs give the same bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

Pair = Any  # two integers
PLACES = 512  # output positions per block: with 8 channels and 128 threads, 32 sums per thread
CHUNK, PROGRAMS = 64, 1024


@triton.jit
def _slide(
    x, w, out, places, OC, OP, IC, OH, OW, sx_m, sx_b, sx_c, sx_h, sx_w,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BP: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """out[m, b, o, oh, ow] = sum over (c, kh, kw) of x[m, b, c, oh SH + kh DH, ow SW + kw DW] w[m, c, kh, kw, o].

    Every thread keeps the sums of a few positions and all BO channels in registers; a kernel tap is one load and BO multiply-adds.
    """
    client = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    image, place = p // (OH * OW), p % (OH * OW)
    here = p < places
    x += client * sx_m + image * sx_b + place // OW * SH * sx_h + place % OW * SW * sx_w
    w += client * (IC * KH * KW * OP) + o
    acc = tl.zeros((BO, BP), dtype=tl.float32)
    for c in range(0, IC):
        for kh in tl.static_range(KH):
            for kw in tl.static_range(KW):
                v = tl.load(x + c * sx_c + kh * DH * sx_h + kw * DW * sx_w, mask=here, other=0.0)
                u = tl.load(w + ((c * KH + kh) * KW + kw) * OP)
                acc += u[:, None] * v[None, :]
    out += client * (places * OC).to(tl.int64)
    tl.store(out + image[None, :] * (OC * OH * OW) + o[:, None] * (OH * OW) + place[None, :], acc, mask=here[None, :] & (o < OC)[:, None])


@triton.jit
def _weigh(
    x, dy, out, places, OC, IC, OH, OW, per_split, splits, sx_m, sx_b, sx_c, sx_h, sx_w,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BO: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[m, split, o, c, tap] = sum over this split's positions of dy[m, b, o, oh, ow] x[m, b, c, oh SH + kh DH, ow SW + kw DW]."""
    part = tl.program_id(2)
    client, split = (part // splits).to(tl.int64), part % splits
    c = tl.program_id(1)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    tap = tl.arange(0, BT)
    x += client * sx_m + c * sx_c
    dy += client * (places * OC).to(tl.int64)
    acc = tl.zeros((BO, BT), dtype=tl.float32)
    for start in range(split * per_split, (split + 1) * per_split, BP):
        p = start + tl.arange(0, BP)
        here = p < places
        image, place = p // (OH * OW), p % (OH * OW)
        a = tl.load(
            dy + (image * (OC * OH * OW) + place)[None, :] + o[:, None] * (OH * OW), mask=here[None, :] & (o < OC)[:, None], other=0.0
        )
        spot = image * sx_b + place // OW * SH * sx_h + place % OW * SW * sx_w
        reach = tap // KW * DH * sx_h + tap % KW * DW * sx_w
        b = tl.load(x + spot[:, None] + reach[None, :], mask=here[:, None] & (tap < KH * KW)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    out += ((client * splits + split) * OC + o[:, None]) * (IC * KH * KW) + c * (KH * KW)
    tl.store(out + tap[None, :], acc, mask=(o < OC)[:, None] & (tap < KH * KW)[None, :])


def convolve(x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """x [m, B, C, H, W], w [m, O, C, kh, kw] -> [m, B, O, OH, OW]."""
    return _sliding(_padded(x, padding), w.permute(0, 2, 3, 4, 1), stride, dilation)


def convolve_back(dy: Tensor, w: Tensor, size: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """The input gradient: dy [m, B, O, OH, OW], w [m, O, C, kh, kw] -> [m, B, C, H, W].

    It is a convolution with the flipped weights, after zeros were inserted between the entries of dy (for strides) and around them.
    """
    if tuple(stride) != (1, 1):
        apart = [(n - 1) * s + 1 for n, s in zip(dy.shape[3:], stride, strict=True)]
        spread = dy.new_zeros(*dy.shape[:3], *apart)
        spread[..., :: stride[0], :: stride[1]] = dy
        dy = spread
    border: list[int] = []
    for i in (1, 0):  # F.pad starts with the last dimension
        reach = dilation[i] * (w.shape[3 + i] - 1)
        border += [reach - padding[i], size[i] - dy.shape[3 + i] + padding[i]]
    return _sliding(F.pad(dy, border), w.flip(3, 4).permute(0, 1, 3, 4, 2), (1, 1), dilation)


def _padded(x: Tensor, padding: Pair) -> Tensor:
    return F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x


def _sliding(x: Tensor, w: Tensor, stride: Pair, dilation: Pair) -> Tensor:
    """Convolve x [m, B, C, H, W], already padded, with w [m, C, kh, kw, O]."""
    m, b = x.shape[:2]
    channels, kh, kw, o = w.shape[1:]
    oh, ow = ((x.shape[3 + i] - dilation[i] * (w.shape[2 + i] - 1) - 1) // stride[i] + 1 for i in (0, 1))
    out = x.new_empty(m, b, o, oh, ow)
    block = 8 if o <= 8 else 16
    wide = triton.cdiv(o, 16) * 16  # output channels last and padded to full blocks, so that a tap's weights are read in wide loads
    weights = F.pad(w, (0, wide - o)).contiguous()
    grid = (triton.cdiv(b * oh * ow, PLACES), triton.cdiv(o, block), m)
    how = (kh, kw, *stride, *dilation, PLACES, block)
    _slide[grid](x, weights, out, b * oh * ow, o, wide, channels, oh, ow, *x.stride(), *how, num_warps=4)
    return out


def convolve_weights(x: Tensor, dy: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, precision: str) -> Tensor:
    """The weight gradient: x [m, B, C, H, W], dy [m, B, O, OH, OW] -> [m, O, C, kh, kw]."""
    x, dy = _padded(x, padding), dy.contiguous()
    m, b, c = x.shape[:3]
    o, oh, ow = dy.shape[2:]
    block = min(64, max(16, triton.next_power_of_2(o)))
    taps = max(16, triton.next_power_of_2(kernel[0] * kernel[1]))
    tiles, places = triton.cdiv(o, block) * c, b * oh * ow
    splits = max(1, min(triton.cdiv(places, 4 * CHUNK), PROGRAMS // (m * tiles)))  # enough programs to fill the GPU
    per_split = triton.cdiv(triton.cdiv(places, splits), CHUNK) * CHUNK
    splits = triton.cdiv(places, per_split)
    out = x.new_empty(m, splits, o, c, *kernel)
    how = (*kernel, *stride, *dilation, block, taps, CHUNK, precision)
    grid = (triton.cdiv(o, block), c, m * splits)
    _weigh[grid](x, dy, out, places, o, c, oh, ow, per_split, splits, *x.stride(), *how, num_warps=4)
    return out.sum(dim=1) if splits > 1 else out[:, 0]


@triton.jit
def _columns(x, out, rows, C, per_split, BR: tl.constexpr, BC: tl.constexpr):
    """out[split, c] = sum over this split's rows of x[row, c]."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    split = tl.program_id(1)
    acc = tl.zeros((BR, BC), dtype=tl.float32)
    for start in range(split * per_split, (split + 1) * per_split, BR):
        row = start + tl.arange(0, BR)
        acc += tl.load(x + row[:, None] * C + c[None, :], mask=(row < rows)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
    tl.store(out + split * C + c, tl.sum(acc, axis=0), mask=c < C)


def columns(x: Tensor) -> Tensor:
    """Return the column sums of [rows, C] in float32."""
    rows, c = x.shape
    splits = max(1, min(64, rows // 512))
    per_split = triton.cdiv(triton.cdiv(rows, splits), 32) * 32
    out = torch.empty(splits, c, device=x.device, dtype=torch.float32)
    _columns[(triton.cdiv(c, 64), splits)](x, out, rows, c, per_split, 32, 64)
    return out.sum(dim=0) if splits > 1 else out[0]
