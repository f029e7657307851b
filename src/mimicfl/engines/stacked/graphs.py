"""Compiles training steps and captures them in CUDA graphs of many steps, so that a few launches replay a whole pass."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

LENGTHS = (32, 8, 1)  # steps per graph: long graphs need few launches, short ones waste nothing at the end
ASKS_FOR_VALUES = "calling .item()"  # part of vmap's message
MOST_LANE_STEPS = 128  # per graph, summed over its lanes: capturing takes time and memory
T = TypeVar("T")


def trace(function: Callable[..., Any], *arguments: Any) -> GraphModule:
    """Trace the operations of a function on these arguments, and remove those whose results are unused."""
    traced = independent_of_values(lambda: make_fx(lambda *given: function(*given))(*arguments))  # make_fx does not accept methods
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def independent_of_values(call: Callable[[], T]) -> T:
    """Call a function of stacked tensors. If it asks for their values, call it again and declare it compiled.

    Models of `transformers`, for example, leave out a mask that has no effect, but never when they are compiled.
    """
    try:
        return call()
    except RuntimeError as error:
        if ASKS_FOR_VALUES not in str(error):
            raise
    torch.compiler._is_compiling_flag = True  # what `torch.compiler.is_compiling()` returns
    try:
        return call()
    finally:
        torch.compiler._is_compiling_flag = False


def compile_traced(traced: GraphModule) -> Any:
    """Compile a traced function.

    By default the compiler times several summation orders and keeps the fastest, which may differ between processes. The option
    `deterministic`, where the PyTorch version has it, turns this off, so that a run gives the same bits again.
    """
    untimed: dict[str, Any] = {"deterministic": True} if "deterministic" in torch._inductor.list_options() else {}
    return torch.compile(traced, fullgraph=True, dynamic=False, options=untimed)


class Graphs:
    """Runs `steps`, each of which advances one lane, or all lanes, by one step in place; several run in parallel, one per stream."""

    def __init__(self, steps: Sequence[Callable[[], object]], device: torch.device) -> None:
        self.steps = steps
        self.captured: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.device = device
            self.streams = [torch.cuda.Stream(device) for _ in steps]
            self._warm_up()

    def _warm_up(self) -> None:
        """Run the steps outside a graph first, so that libraries choose their algorithms and allocate their workspaces."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for step in self.steps:
                for _ in range(2):
                    step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize(self.device)

    def advance(self, m: int, most: int) -> int:
        """Advance the first m lanes by up to `most` steps; return the number of steps."""
        if not self.cuda:
            for step in self.steps[: max(1, m)]:
                step()
            return 1
        together = min(len(self.steps), m)
        length = next(n for n in LENGTHS if n == 1 or (n <= most and n * together <= MOST_LANE_STEPS))
        if (together, length) not in self.captured:
            self.captured[together, length] = self._capture(together, length)
        self.captured[together, length].replay()
        return length

    def _capture(self, together: int, length: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            if together == 1:
                for _ in range(length):
                    self.steps[0]()
            else:  # fork all streams before joining any: a join in between would serialise them
                side_by_side = list(zip(self.steps[:together], self.streams, strict=False))
                for _, stream in side_by_side:
                    stream.wait_stream(main)
                for step, stream in side_by_side:
                    with torch.cuda.stream(stream):
                        for _ in range(length):
                            step()
                for _, stream in side_by_side:
                    main.wait_stream(stream)
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection: freeing an old graph while another is being captured breaks the capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
