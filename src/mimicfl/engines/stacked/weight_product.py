"""Weight gradients that are not stored: one kernel computes the gradient of a wide convolution and applies the update."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen
from torch.utils._pytree import tree_flatten

from .batched.tiles import weight_splits
from .lanes import Lanes

_aten = torch.ops.aten
VIEWS = (_aten.permute.default, _aten.view.default, _aten._unsafe_view.default, _aten.clone.default, _aten.alias.default)


@dataclass(frozen=True)
class WeightProduct:
    """The weight gradient of stacked convolutions [m, n], given by its factors: the inputs x and the output gradients dy."""

    x: Tensor  # [m, B, C, H, W]
    dy: Tensor  # [m, B, O, OH, OW]
    how: tuple[Any, ...]  # kernel size, stride, padding, dilation, precision

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.x), self.dy.shape[2] * self.x.shape[2] * prod(self.how[0])

    def update(self, lanes: Any) -> None:
        """Compute the gradient and apply it to these `LaneParts`."""
        from .batched.implicit_gemm import update_weights

        update_weights(self.x, self.dy, *self.how, lanes)


class Postponed:
    """Changes a traced function of gradient pieces and losses: large convolutions return the factors of their weight gradients."""

    def __init__(self, traced: GraphModule) -> None:
        output = next(node for node in traced.graph.nodes if node.op == "output")
        *pieces, value = tree_flatten(output.args[0])[0]
        products = [_product(piece) for piece in pieces]
        self.how = [None if product is None else tuple(product.args[2:]) for product in products]
        factors = [piece if product is None else list(product.args[:2]) for piece, product in zip(pieces, products, strict=True)]
        code = traced.graph._codegen
        if isinstance(code, _PyTreeCodeGen):  # returns a flat list, and restores the structure
            flat, structure = tree_flatten((factors, value))
            output.args = (flat,)
            code.pytree_info = code.pytree_info._replace(out_spec=structure)
        else:
            output.args = ((factors, value),)
        traced.graph.eliminate_dead_code()
        traced.recompile()

    def pieces(self, found: Sequence[Any]) -> list[Tensor | WeightProduct]:
        """The pieces, from what the function returned for them."""
        return [piece if how is None else WeightProduct(*piece, how) for piece, how in zip(found, self.how, strict=True)]


def _product(piece: Node) -> Node | None:
    """Return the weight gradient that a piece is a view of, if one program computes each of its tiles."""
    lanes = len(piece.meta["val"])
    while piece.target in VIEWS:
        piece = piece.args[0]  # type: ignore[assignment]
    if piece.target is not torch.ops.mimicfl.conv_weight.default:
        return None
    x, dy = (factor.meta["val"] for factor in piece.args[:2])  # type: ignore[union-attr]
    alone = len(x) == lanes and weight_splits(x, dy, piece.args[2]) == 1  # with several groups, x has a row per client and group
    return piece if alone else None


def can_postpone(lanes: Lanes) -> bool:
    """Whether a kernel may update these lanes before all gradients are known, in one pass."""
    return one_pass(lanes) and lanes.clip is None


def one_pass(lanes: Lanes) -> bool:
    """Whether one kernel can update these lanes: plain SGD in float32 on a GPU."""
    bare = lanes.u is None and lanes.decay is None and lanes.scale is None
    return bare and lanes.w.is_cuda and lanes.w.dtype == torch.float32
