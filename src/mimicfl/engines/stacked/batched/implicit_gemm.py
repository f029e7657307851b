"""Triton kernels for the wide convolutions of many clients at once, on tensor cores: implicit matrix products, one per client.

A convolution is a product of the patches of the input with the weights. The patches are gathered while the product is computed, so they
are never stored. Activations and weights are channels last, so that a tile is read in wide loads. The tiles follow from the shapes alone
(`tiles.py`), and no sum uses atomic additions, so the same inputs give the same bits in every process.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import product_depth, product_tile, weight_tiles

Pair = Any  # two integers


@triton.jit
def _gather_product(
    x, w, y, B, N, w_tap, x_m, x_b, x_h, x_w, w_m, w_k, w_n, H, W,
    OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, BACK: tl.constexpr, EVERY: tl.constexpr, ACROSS: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[m, place, n] = sum over taps and the C channels of x at the tap's pixel of this place, times w[m, tap, channel, n].

    BACK computes the input gradient: x is then the output gradient, and a tap leads from the input's pixel to one of the output, if any.
    With a stride, only every EVERY-th tap leads from a row to a pixel (and every ACROSS-th from a column), so a program computes rows and
    columns that share their taps.
    """
    tiles = tl.cdiv(N, BN)
    client = tl.program_id(1).to(tl.int64)
    if EVERY * ACROSS == 1:  # every row and column has all taps, so that the divisors below are constants
        top, left, high, wide = 0, 0, 0, 0
        rows: tl.constexpr = OH
        columns: tl.constexpr = OW
        across: tl.constexpr = KW
    else:
        top, left = tl.program_id(2) // ACROSS, tl.program_id(2) % ACROSS  # of this program's rows and columns
        high, wide = (top + PH) % EVERY, (left + PW) % ACROSS  # the first of their taps
        rows, columns = (OH - top + EVERY - 1) // EVERY, (OW - left + ACROSS - 1) // ACROSS
        across = (KW - wide + ACROSS - 1) // ACROSS
    p = tl.program_id(0) // tiles * BP + tl.arange(0, BP)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    image, row, column = p // (rows * columns), p // columns % rows * EVERY + top, p % columns * ACROSS + left
    inside = p < B * rows * columns
    taps = (KH - high + EVERY - 1) // EVERY * across
    x += client * x_m
    w += client * w_m
    base = image * x_b
    acc = tl.zeros((BP, BN), dtype=tl.float32)
    for step in range(0, tl.cdiv(taps * C, BK)):
        if C % BK == 0:  # all of this step's channels belong to one tap
            turn = step // (C // BK)
            kh, kw = high + turn // across * EVERY, wide + turn % across * ACROSS
            c = step % (C // BK) * BK + tl.arange(0, BK)
            if BACK:
                down, right = row + PH - kh * DH, column + PW - kw * DW
                h, v = down // SH, right // SW
                here = inside & (down % SH == 0) & (right % SW == 0)
            else:
                h, v = row * SH - PH + kh * DH, column * SW - PW + kw * DW
                here = inside
            here = here & (h >= 0) & (h < H) & (v >= 0) & (v < W)
            a = tl.load(x + (base + h * x_h + v * x_w)[:, None] + c[None, :], mask=here[:, None], other=0.0)
            b = tl.load(w + (kh * KW + kw) * w_tap + c[:, None] * w_k + n[None, :] * w_n, mask=(n < N)[None, :], other=0.0)
        else:
            k = step * BK + tl.arange(0, BK)
            turn, c = k // C, k % C
            kh, kw = high + turn // across * EVERY, wide + turn % across * ACROSS
            if BACK:
                down, right = row[:, None] + PH - (kh * DH)[None, :], column[:, None] + PW - (kw * DW)[None, :]
                h, v = down // SH, right // SW
                here = inside[:, None] & (down % SH == 0) & (right % SW == 0)
            else:
                h, v = row[:, None] * SH - PH + (kh * DH)[None, :], column[:, None] * SW - PW + (kw * DW)[None, :]
                here = inside[:, None] & (h >= 0)
            here = here & (h >= 0) & (h < H) & (v >= 0) & (v < W) & (k < taps * C)[None, :]
            a = tl.load(x + base[:, None] + h * x_h + v * x_w + c[None, :], mask=here, other=0.0)
            b = tl.load(
                w + ((kh * KW + kw) * w_tap + c * w_k)[:, None] + n[None, :] * w_n,
                mask=(k < taps * C)[:, None] & (n < N)[None, :],
                other=0.0,
            )
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    y += client * B * (OH * OW) * N
    place = (image * OH + row) * OW + column
    tl.store(y + place[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), mask=inside[:, None] & (n < N)[None, :])


@triton.jit
def _weight_product(
    x, dy, out, places, OC, splits, x_m, x_b, x_h, x_w, H, W,
    OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    STEPS: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[m, split, o, tap, c] = sum over this split's places of dy[m, place, o] times x[m, c] at the tap's pixel of the place."""
    tiles = tl.cdiv(KH * KW * C, BN)
    client, split = (tl.program_id(1) // splits).to(tl.int64), tl.program_id(1) % splits
    o = tl.program_id(0) // tiles * BO + tl.arange(0, BO)
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    tap = n // C
    x += client * x_m
    dy += client * places * OC
    acc = tl.zeros((BO, BN), dtype=tl.float32)
    for step in range(0, STEPS):
        p = (split * STEPS + step) * BP + tl.arange(0, BP)
        image, row, column = p // (OH * OW), p // OW % OH, p % OW
        a = tl.load(dy + p[:, None] * OC + o[None, :], mask=(p < places)[:, None] & (o < OC)[None, :], other=0.0)
        h, v = row[:, None] * SH - PH + (tap // KW * DH)[None, :], column[:, None] * SW - PW + (tap % KW * DW)[None, :]
        here = (p < places)[:, None] & (h >= 0) & (h < H) & (v >= 0) & (v < W) & (n < KH * KW * C)[None, :]
        b = tl.load(x + (image * x_b)[:, None] + h * x_h + v * x_w + (n % C)[None, :], mask=here, other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
    where = o[:, None] * (KH * KW * C) + n[None, :]
    here = (o < OC)[:, None] & (n < KH * KW * C)[None, :]
    out += (client * splits + split) * OC * (KH * KW * C)
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=here)


def convolve(x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, precision: str) -> Tensor:
    """x [m, B, C, H, W], w [m, O, C, kh, kw] -> [m, B, O, OH, OW], channels last."""
    size = [(x.shape[3 + i] + 2 * padding[i] - dilation[i] * (w.shape[3 + i] - 1) - 1) // stride[i] + 1 for i in (0, 1)]
    w = weights_last(w)
    how = (*w.shape[3:], *stride, *padding, *dilation, False)
    return _product(pixels_last(x), w, w.stride(2), w.stride(1), w.shape[1], size, how, precision)


def convolve_back(dy: Tensor, w: Tensor, size: Pair, stride: Pair, padding: Pair, dilation: Pair, precision: str) -> Tensor:
    """The input gradient: dy [m, B, O, OH, OW], w [m, O, C, kh, kw] -> [m, B, C, H, W], channels last."""
    w = weights_last(w)
    how = (*w.shape[3:], *stride, *padding, *dilation, True)
    return _product(pixels_last(dy), w, w.stride(1), w.stride(2), w.shape[2], size, how, precision)


def _product(x: Tensor, w: Tensor, w_k: int, w_n: int, n: int, size: Pair, how: tuple[Any, ...], precision: str) -> Tensor:
    m, b, c = x.shape[:3]
    y = new_pixels_last(x, m, b, n, *size)
    (_, _, *stride, _, _, dh, dw, back), shared = how, (1, 1)
    if back and (dh, dw) == (1, 1):
        shared = tuple(stride)
    places = b * triton.cdiv(size[0], shared[0]) * triton.cdiv(size[1], shared[1])  # the most that share their taps
    phases = shared[0] * shared[1]
    bp, bn, warps = product_tile(places, n, m * phases)
    bk = product_depth(c, x.dtype)
    grid = (triton.cdiv(places, bp) * triton.cdiv(n, bn), m, phases)
    strides = (x.stride(0), x.stride(1), x.stride(3), x.stride(4), w.stride(0), w_k, w_n)
    _gather_product[grid](
        x, w, y, b, n, w.stride(4), *strides, *x.shape[3:], *size, c, *how, *shared, bp, bn, bk, precision, num_warps=warps, num_stages=3
    )
    return y


def convolve_weights(x: Tensor, dy: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, precision: str) -> Tensor:
    """The weight gradient: x [m, B, C, H, W], dy [m, B, O, OH, OW] -> [m, O, C, kh, kw], channels last."""
    x, dy = pixels_last(x), new_layout(dy)
    m, b, c = x.shape[:3]
    o, oh, ow = dy.shape[2:]
    tiles, splits, steps, tile = weight_tiles(m, b * oh * ow, o, kernel[0] * kernel[1] * c, x.dtype)
    out = torch.empty(m, splits, o, *kernel, c, device=x.device, dtype=x.dtype if splits == 1 else torch.float32)
    strides = (x.stride(0), x.stride(1), x.stride(3), x.stride(4))
    sizes = (b * oh * ow, o, splits, *strides, *x.shape[3:], oh, ow, c, *kernel)
    how = (*stride, *padding, *dilation, steps, *tile, precision)
    _weight_product[(tiles, m * splits)](x, dy, out, *sizes, *how, num_warps=4, num_stages=3)
    return (out[:, 0] if splits == 1 else out.sum(dim=1).to(x.dtype)).permute(0, 1, 4, 2, 3)


def pixels_last(x: Tensor) -> Tensor:
    """Return x [m, B, C, H, W] with adjacent channels; the other strides are arbitrary, so a shared input is not copied per client."""
    return x if x.stride(2) == 1 else x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def new_layout(x: Tensor) -> Tensor:
    """Return x [m, B, C, H, W] stored densely as [m, B, H, W, C]."""
    return x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def weights_last(w: Tensor) -> Tensor:
    """Return w [m, O, C, kh, kw] with adjacent channels and adjacent taps."""
    c, kh, kw = w.shape[2:]
    dense = w.stride()[1:] == (kh * kw * c, 1, kw * c, c)
    return w if dense else w.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def new_pixels_last(x: Tensor, m: int, b: int, c: int, h: int, w: int) -> Tensor:
    return x.new_empty(m, b, h, w, c).permute(0, 1, 4, 2, 3)
