"""The stacked step as a program: traced once, compiled if requested, and on a GPU captured in CUDA graphs of many steps."""

from typing import Any

from torch import Tensor

from ....data.samples import Samples
from ..graphs import Graphs, compile_traced, trace
from ..lanes import Lanes
from .step import Stack


class Program:
    """Advances lanes by steps. `m` is fixed, because graphs and compiled code have fixed shapes."""

    def __init__(self, stack: Stack, lanes: Lanes, x: Samples, y: Samples, m: int, compiled: bool) -> None:
        self.lanes, self.m = lanes, m
        tensors = {name: value for name, value in vars(lanes).items() if isinstance(value, (Tensor, dict))}

        def step(held: dict[str, Any], x: Samples, y: Samples) -> None:
            view = Lanes.__new__(Lanes)
            view.__dict__ = {**vars(lanes), **held}
            stack.step(view, m, x, y)

        traced = trace(step, tensors, x, y)
        run = compile_traced(traced) if compiled else traced
        self.graphs = Graphs([lambda: run(tensors, x, y)], lanes.w.device)

    def advance(self, m: int, most: int) -> int:
        return self.graphs.advance(m, most)
