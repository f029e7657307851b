"""A Triton kernel for the matrix products of many clients at once."""

import triton
import triton.language as tl
from torch import Tensor

TILE, DEPTH = 64, 32


@triton.jit
def _multiply(
    a, b, out, M, N, K, a_m, a_i, a_k, b_m, b_k, b_j, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[m, i, j] = sum over k of a[m, i, k] b[m, k, j]."""
    tiles = tl.cdiv(N, BN)
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    j = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    a += client * a_m
    b += client * b_m
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        k = step * BK + tl.arange(0, BK)
        left = tl.load(a + i[:, None] * a_i + k[None, :] * a_k, mask=(i < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(b + k[:, None] * b_k + j[None, :] * b_j, mask=(k < K)[:, None] & (j < N)[None, :], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    out += client * M * N
    tl.store(out + i[:, None] * N + j[None, :], acc, mask=(i < M)[:, None] & (j < N)[None, :])


def multiply(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """a [m, M, K] @ b [m, K, N] with any strides."""
    m, rows, depth = a.shape
    columns = b.shape[2]
    out = a.new_empty(m, rows, columns)
    grid = (triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE), m)
    sizes = (rows, columns, depth, *a.stride(), *b.stride())
    _multiply[grid](a, b, out, *sizes, TILE, TILE, DEPTH, precision, num_warps=4, num_stages=3)
    return out
