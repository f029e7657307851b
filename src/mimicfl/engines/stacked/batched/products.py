"""Kernels of our own for operations of a traced step: float32 matrix products of many clients, and gradients of embeddings.

Libraries compute products of many small float32 matrices on the ordinary cores, with tiles that leave most of the GPU idle. Ours run on
tensor cores, three products in TF32 each, which keeps the accuracy of float32. The gradient of an embedding adds up the places of a token
in their order, where PyTorch's compiler would use atomic additions, in any order.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .tiles import float_tile

aten = torch.ops.aten
SMALLEST = 32  # rows, columns and summed entries; libraries are as good for smaller matrices
LARGEST = 2**30  # entries of a client's matrix: their addresses are 32-bit numbers
ROWS, MOST_PLACES, MOST_ENTRIES = 64, 10_000, 1024  # of a client's embedding: rows per block, and what fits on the chip
STAGES, DEPTH = 3, 32  # as in product.cu


@torch.library.custom_op("mimicfl::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, M, K] @ b [m, K, N]."""
    return multiply(a, b) if a.is_cuda else a @ b


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


def multiply(a: Tensor, b: Tensor) -> Tensor:
    from ..cuda import launch

    a, b = _packed(a), _packed(b)
    (m, rows, depth), columns = a.shape, b.shape[2]
    bm, bn, wm, wn, wk = float_tile(m, rows, columns, depth)
    out = a.new_empty(m, rows, columns)
    strides = zip(("A_M", "A_I", "A_K", "B_M", "B_K", "B_J"), (*a.stride(), *b.stride()), strict=True)
    tile = {"BM": bm, "BN": bn, "WM": wm, "WN": wn, "WK": wk}
    constants = {"M": rows, "N": columns, "K": depth, **dict(strides), "A_WIDE": _wide(a), "B_WIDE": _wide(b), **tile}
    stage = sum(size * (DEPTH + 4) if last else DEPTH * (size + 8) for size, last in ((bm, a.stride(2) == 1), (bn, b.stride(1) == 1)))
    blocks = m * -(-rows // bm) * -(-columns // bn)
    launch("product", "product", constants, blocks, 32 * wm * wn * wk, 4 * max(STAGES * stage, bm * bn), [a, b, out])
    return out


def _packed(x: Tensor) -> Tensor:
    return x if 1 in x.stride()[1:] else x.contiguous()


def _wide(x: Tensor) -> bool:
    """Whether 16 bytes can be copied at once: then no group of four entries is cut by an edge or badly aligned."""
    outer, inner = (x.stride(1), x.shape[2]) if x.stride(2) == 1 else (x.stride(2), x.shape[1])
    return not (x.data_ptr() % 16 or x.stride(0) % 4 or outer % 4 or inner % 4)


@torch.library.custom_op("mimicfl::embedding_back", mutates_args=())
def embedding_back(dy: Tensor, ids: Tensor, rows: int) -> Tensor:
    """The gradient [m rows, E] of m embeddings, given dy [m, ..., E] and ids [m, ...], which count the rows of all embeddings."""
    if dy.is_cuda:
        return collect(dy, ids, rows)
    return aten.embedding_dense_backward(dy, ids, len(ids) * rows, -1, False)  # type: ignore[no-any-return]


@embedding_back.register_fake
def _(dy: Tensor, ids: Tensor, rows: int) -> Tensor:
    return dy.new_empty(len(ids) * rows, dy.shape[-1])


def collect(dy: Tensor, ids: Tensor, rows: int) -> Tensor:
    from ..cuda import launch

    out = dy.new_empty(len(ids) * rows, dy.shape[-1], dtype=torch.float32)
    places = ids[0].numel()
    constants = {"T": places, "V": rows, "E": dy.shape[-1]}
    arguments: list[Any] = [dy.float().contiguous(), ids.contiguous(), out]
    launch("embedding", "embedding_back", constants, len(ids) * -(-rows // ROWS), 256, 4 * places, arguments)
    return out.to(dy.dtype)


def has_tensor_cores(device: torch.device) -> bool:
    """Whether the device has tensor cores that compute in TF32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def use_kernels(traced: GraphModule, m: int, precision: str) -> None:
    """Replace what our kernels can compute in a step of m clients; products only where they must have the accuracy of float32."""
    for node in traced.graph.nodes:
        if node.target is aten.bmm.default and precision == "tf32x3":
            _replace_product(node)
        elif node.target is aten.embedding_dense_backward.default:
            _replace_embedding(node, m)
    traced.recompile()


def _replace_product(node: Node) -> None:
    a, b = (_value(argument) for argument in node.args)
    rows, depth, columns = a.shape[1], a.shape[2], b.shape[2]
    if a.dtype == torch.float32 and min(rows, depth, columns) >= SMALLEST and max(rows, columns) * depth <= LARGEST:
        node.target = torch.ops.mimicfl.product.default


def _replace_embedding(node: Node, m: int) -> None:
    dy, ids, rows, padding, scaled = node.args
    value, places = _value(dy), _value(ids).shape
    known = value.dtype in (torch.float32, torch.bfloat16) and places[0] == m and len(places) > 1
    fits = value.shape[-1] <= MOST_ENTRIES and math.prod(places[1:]) <= MOST_PLACES
    if known and fits and not scaled and padding == -1 and rows % m == 0:  # type: ignore[operator]
        node.target, node.args = torch.ops.mimicfl.embedding_back.default, (dy, ids, rows // m)  # type: ignore[operator]


def _value(node: Any) -> Any:
    """The tensor that a node had while it was traced, or what describes it."""
    return node.meta.get("val", node.meta.get("tensor_meta"))
