"""What the two layouts of a network's activations have in common: `LaneNet` (generate.py) and `ChannelsLastNet` (channels_last.py)."""

from collections.abc import Mapping
from typing import ClassVar

from .trace import Layer


class Net:
    """Collects the buffers and calls of a network. Layer k writes `outputs[k]`; the gradient of its output is in `gradients[k]`."""

    losses: ClassVar[Mapping[str, str]] = {}  # the kernel of each loss

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self.vectors: dict[str, int] = {}
        self.floats: dict[str, int] = {}
        self.declarations: list[str] = []  # buffers whose sizes depend on the kernels
        self.outputs: list[str] = []
        self.gradients: list[str] = []
        self.prepare: list[str] = ["(void)s, (void)w;"]
        self.forward: list[str] = []
        self.backward: list[str] = []
        self.below, self.needs_input_gradient = "input", False

    def begin(self, k: int) -> None:
        """Layer k comes next."""
        self.below = self.outputs[-1] if self.outputs else "input"
        self.needs_input_gradient = any(lower.weight >= 0 for lower in self.layers[:k])

    def members(self, loss: str) -> list[str]:
        """Return the functions that depend on the layout."""
        output = self.outputs[-1]
        return [
            "static void gather(Work& s, const Sample* pool, const float* table, const int64_t* rows, int count) {",
            f"  {self.gather()}(pool, table, rows, count, s.input);",
            "}",
            "static double loss(Work& s, const Target* target, const int64_t* rows, int count, int batch) {",
            f"  return {self.losses[loss]}<OUTPUTS>(s.{output}, target, rows, count, batch, s.{self.gradients[-1]});",
            "}",
            f"static float output(const Work& s, int i, int j) {{ return {self.output(output)}; }}",
        ]

    def gather(self) -> str:
        """The function that loads samples."""
        raise NotImplementedError

    def output(self, buffer: str) -> str:
        """Output j of sample i in this buffer."""
        raise NotImplementedError

    def gradient_below(self, k: int) -> str:
        return f"s.{self.gradients[k - 1]}"

    def _pool(self, k: int, layer: Layer, name: str, back: str) -> None:
        raise NotImplementedError

    def _max_pool(self, k: int, layer: Layer) -> None:
        self._pool(k, layer, "max_pool", f"s.{self.below}, s.a{k}, ")

    def _avg_pool(self, k: int, layer: Layer) -> None:
        self._pool(k, layer, "avg_pool", "")
