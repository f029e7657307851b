"""The stacked step as a program: traced once, compiled if requested, and on a GPU captured in CUDA graphs of many steps."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ....data.samples import Samples
from ..graphs import Graphs, compile_traced, trace
from ..lanes import Lanes
from .products import has_tensor_cores, use_kernels
from .step import Stack


class Program:
    """Advances lanes by steps. `m` is fixed, because graphs and compiled code have fixed shapes."""

    def __init__(self, stack: Stack, lanes: Lanes, x: Samples, y: Samples, m: int, compiled: bool) -> None:
        self.lanes, self.m = lanes, m
        tensors = {name: value for name, value in vars(lanes).items() if isinstance(value, (Tensor, dict))}

        def part(function: Callable[..., Any]) -> Callable[..., Any]:
            """The function of lanes as one of their tensors, which the compiler needs to see."""

            def of_tensors(held: dict[str, Any], x: Samples, y: Samples) -> Any:
                view = Lanes.__new__(Lanes)
                view.__dict__ = {**vars(lanes), **held}
                return function(view, m, x, y)

            return of_tensors

        traced = trace(part(stack.pieces if lanes.direct else stack.step), tensors, x, y)
        if has_tensor_cores(lanes.w.device):
            use_kernels(traced, m, stack.precision)
        run = compile_traced(traced) if compiled else traced

        def step() -> None:
            found = run(tensors, x, y)
            if lanes.direct:  # the update has a kernel of its own
                stack.update(lanes, m, *found)

        self.graphs = Graphs([step], lanes.w.device)

    def advance(self, m: int, most: int) -> int:
        return self.graphs.advance(m, most)
