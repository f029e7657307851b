"""Steps made fast: compiled, and on a GPU captured in CUDA graphs of many, which are replayed with a handful of launches."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

LENGTHS = (32, 8, 1)  # steps in one graph: few launches while there is much to do, no waste at the end
MOST_LANE_STEPS = 128  # in one graph, all its lanes together: capturing takes time and memory


def trace(function: Callable[..., Any], *arguments: Any) -> GraphModule:
    """The operations that a function does to these arguments, without what nobody reads."""
    traced = make_fx(lambda *given: function(*given))(*arguments)  # it takes no method
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def translate(traced: GraphModule) -> Any:
    """The same by the compiler.

    Left to itself it times several orders of summation and keeps the fastest, which in the next process may be another one. It is
    told to choose without a clock (older versions cannot be told), so that a run gives the same bits again.
    """
    untimed: dict[str, Any] = {"deterministic": True} if "deterministic" in torch._inductor.list_options() else {}
    return torch.compile(traced, fullgraph=True, dynamic=False, options=untimed)


class Graphs:
    """`steps` are functions that move one lane, or all lanes, by one step in place; several run side by side, each on its stream."""

    def __init__(self, steps: Sequence[Callable[[], object]], device: torch.device) -> None:
        self.steps = steps
        self.captured: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.device = device
            self.streams = [torch.cuda.Stream(device) for _ in steps]
            self._warm_up()

    def _warm_up(self) -> None:
        """Outside a graph first: libraries choose their algorithms and allocate what they keep."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for step in self.steps:
                for _ in range(2):
                    step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize(self.device)

    def advance(self, m: int, most: int) -> int:
        """Move the first m lanes by up to `most` steps; returns by how many."""
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
            else:  # all streams leave the main one before any comes back: one that is waited for in between would order them
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
