"""The stacked step made fast: traced once, compiled where that pays, and on a GPU captured in graphs of many steps."""

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ..graphs import Graphs
from ..lanes import Lanes
from .step import Stack


class Program:
    """Moves lanes by steps. `m` is fixed: graphs and compiled code know their shapes."""

    def __init__(self, stack: Stack, lanes: Lanes, x: Tensor, y: Tensor, m: int, compiled: bool) -> None:
        self.lanes, self.m = lanes, m
        tensors = {name: value for name, value in vars(lanes).items() if isinstance(value, Tensor)}

        def step(held: dict[str, Tensor], x: Tensor, y: Tensor) -> None:
            view = Lanes.__new__(Lanes)
            view.__dict__ = {**vars(lanes), **held}
            stack.step(view, m, x, y)

        traced = make_fx(step)(tensors, x, y)
        traced.graph.eliminate_dead_code()
        traced.recompile()
        run = torch.compile(traced, fullgraph=True, dynamic=False) if compiled else traced
        self.graphs = Graphs([lambda: run(tensors, x, y)], x.device)

    def advance(self, m: int, most: int) -> int:
        return self.graphs.advance(m, most)
