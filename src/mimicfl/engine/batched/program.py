"""The stacked step made fast: traced once, compiled where that pays, and on a GPU captured in graphs of many steps."""

from torch import Tensor

from ..graphs import Graphs, trace, translate
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

        traced = trace(step, tensors, x, y)
        run = translate(traced) if compiled else traced
        self.graphs = Graphs([lambda: run(tensors, x, y)], x.device)

    def advance(self, m: int, most: int) -> int:
        return self.graphs.advance(m, most)
