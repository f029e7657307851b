"""Generates the CUDA code of a traced network: where its activations are, and the phases of the forward and backward passes."""

from dataclasses import dataclass, field
from pathlib import Path

from ...capabilities import Unsupported
from ..generate import TARGETS, LaneNet, each_written_once
from ..trace import Layer
from .plan import THREADS, ConvShape, plan_conv, plan_linear

HERE = Path(__file__).parent
EXTRAS = ("SHIFT", "PROX", "MOMENTUM", "PARTS", "FIRST", "LAST")  # PARTS: larger batches than lanes; FIRST, LAST: gradients that are sent
MOST_TAPS, MOST_WINDOW = 49, 9  # larger ones do not fit into registers


@dataclass
class Block:
    """A layer with weights, with the pooling and the activation that follow it."""

    layer: Layer
    pool: Layer | None = None
    activation: str = "NONE"

    @property
    def out(self) -> tuple[int, int, int]:
        return self.layer.out if self.pool is None else self.pool.out

    @property
    def is_conv(self) -> bool:
        return self.layer.kind == "conv"


@dataclass
class Memory:
    """Divides a block's memory. What does not fit into shared memory is stored in global memory."""

    limit: int  # floats
    shared: int = 0
    far: int = 0
    names: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, size: int) -> None:
        size = -(-size // 4) * 4
        if self.shared + size <= self.limit:
            self.names[name] = f"(s + {self.shared})"
            self.shared += size
        else:
            self.names[name] = f"(far + {self.far})"
            self.far += -(-size // 32) * 32


@dataclass(frozen=True)
class Source:
    """The code of a network, and the floats that a block needs: in shared memory; in global memory for parameters and large activations."""

    code: str
    shared: int
    space: int


def generate(layers: list[Layer], dimension: int, loss: str, uint8: bool, lanes: int, limit: int, extras: frozenset[str]) -> Source:
    """Return the CUDA source of a network. A block has `limit` bytes of shared memory.

    `extras` says what the local steps have besides the gradient.
    """
    if not each_written_once(layers, dimension):
        raise Unsupported("some of its parameters are shared or unused")
    net = _Net(join(layers), lanes, limit // 4, layers[0].shape, layers[0].shape[0] if uint8 else 0)
    room = -(-dimension // 32) * 32
    memory = net.memory
    lines = [
        f"#define THREADS {THREADS}",
        f"#define LANES {lanes}",
        *[f"#define {name} {int(name in extras)}" for name in EXTRAS],
        _text("portable.h"),
        f"typedef {'uint8_t' if uint8 else 'float'} Sample;",
        f"typedef {TARGETS[loss]} Target;",
        f"#define LOSS {LaneNet.losses[loss]}",
        _text("layers.h"),
        _text("convolution.h"),
        *net.types,
        "struct Net {",
        f"  static constexpr int D = {dimension}, ROOM = {room}, OUTPUTS = {layers[-1].out[0]}, TABLE = {256 * net.channels};",
        f"  static constexpr int SHARED = {memory.shared}, FAR = {memory.far}, SPACE = 4 * ROOM + FAR;",
        "  float *s, *far;",
        f"  DEVICE_MEMBER float* table() const {{ return {memory.names['table']}; }}",
        f"  DEVICE_MEMBER float* output() const {{ return {net.at(len(net.blocks))}; }}",
        "  DEVICE_MEMBER void clear() const {",
        "    LOOP EACH(k, SHARED) s[k] = 0.f;",
        "    LOOP EACH(k, FAR) far[k] = 0.f;",
        "    SYNC;",
        "  }",
        "  DEVICE_MEMBER void gather_samples(const Sample* pool, const int32_t* rows, int count) const {",
        f"    gather<Image0, {max(net.channels, 1)}>(pool, table(), rows, count, {net.at(0)});",
        "  }",
        "  DEVICE_MEMBER void prepare(const float* w) const {",
        *[f"    {line}" for line in net.prepare],
        "  }",
        "  DEVICE_MEMBER void forward(const float* w, bool training) const {",
        *[f"    {line}" for line in net.forward],
        "  }",
        "  DEVICE_MEMBER void backward(const float* w, const Step& step) const {",
        *[f"    {line}" for lines in reversed(net.backward) for line in lines],
        "  }",
        "};",
        _text("driver.h"),
    ]
    return Source("\n".join(lines), memory.shared, 4 * room + memory.far)


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def join(layers: list[Layer]) -> list[Block]:
    """Join each layer that has weights with the pooling and the activation after it."""
    blocks: list[Block] = []
    for layer in layers:
        if layer.kind in ("conv", "linear"):
            blocks.append(Block(layer))
            _check_conv(layer, first=len(blocks) == 1)
        elif not blocks or blocks[-1].activation != "NONE":
            raise Unsupported(f"its {layer.kind} does not follow a convolution, a linear layer or max pooling")
        elif layer.kind == "max_pool" and blocks[-1].is_conv and blocks[-1].pool is None and layer.kernel == layer.stride:
            blocks[-1].pool = layer
            if layer.kernel[0] * layer.kernel[1] > MOST_WINDOW:
                raise Unsupported(f"its pooling windows are larger than {MOST_WINDOW} pixels")
        elif layer.kind in ("relu", "tanh"):
            blocks[-1].activation = layer.kind.upper()
        else:
            raise Unsupported(f"it has a {layer.kind} layer that native does not support on a GPU")
    return blocks


def _check_conv(layer: Layer, first: bool) -> None:
    if layer.kind != "conv":
        return
    if layer.padding[0] != layer.padding[1]:
        raise Unsupported("a convolution is padded differently in height and width")
    if layer.stride != (1, 1) and not first:
        raise Unsupported("a convolution after the first layer has a stride")
    if layer.kernel[0] * layer.kernel[1] > MOST_TAPS:
        raise Unsupported(f"a convolution's kernel has more than {MOST_TAPS} weights per channel")


class _Net:
    """Collects the buffers and phases of a network. Activation k is the input of block k; its gradient replaces it."""

    def __init__(self, blocks: list[Block], lanes: int, limit: int, shape: tuple[int, int, int], channels: int) -> None:
        self.blocks, self.lanes, self.channels = blocks, lanes, channels
        self.memory = Memory(limit)
        self.types: list[str] = []
        self.prepare: list[str] = ["(void)w;"]
        self.forward: list[str] = ["(void)w, (void)training;"]
        self.backward: list[list[str]] = []
        self.sizes: dict[str, int] = {"table": 256 * channels, "scratch": 0}
        for k, size in enumerate([shape, *[block.out for block in blocks]]):
            self._image(k, size)
        for k, block in enumerate(blocks):
            self._conv_buffers(k, block) if block.is_conv else self._linear_buffers(k, block)
        for name, room in sorted(self.sizes.items(), key=lambda pair: (pair[1], pair[0])):  # the small ones are used most per byte
            self.memory.add(name, room)
        for k, block in enumerate(blocks):
            self._conv(k, block) if block.is_conv else self._linear(k, block)

    def at(self, k: int) -> str:
        return self.memory.names[f"a{k}"]

    def _image(self, k: int, shape: tuple[int, int, int]) -> None:
        """Declare activation k with the border that the next convolution needs.

        Between convolutions the channels are an odd number of features apart, so that neighbouring channels are in different banks.
        """
        following = self.blocks[k] if k < len(self.blocks) and self.blocks[k].is_conv else None
        border = following.layer.padding[0] if following else 0
        stride = (shape[1] + 2 * border) * (shape[2] + 2 * border)
        stride += int(following is not None and stride % 2 == 0)
        self.types.append(f"typedef Image<{shape[0]}, {shape[1]}, {shape[2]}, {border}, {stride}> Image{k};")
        self.sizes[f"a{k}"] = shape[0] * stride * self.lanes

    def _below(self, k: int) -> str:
        return self.blocks[k - 1].activation

    def _scratch(self, size: int) -> None:
        self.sizes["scratch"] = max(self.sizes["scratch"], size)

    def _conv_buffers(self, k: int, block: Block) -> None:
        layer = block.layer
        window = block.pool.kernel if block.pool else (1, 1)
        shape = ConvShape(layer.shape[0], layer.out[0], layer.kernel, layer.stride, window, layer.shape[1:], block.out[1:])  # type: ignore[arg-type]
        plan = plan_conv(shape, self.lanes, needs_input=k > 0)
        numbers = [*layer.kernel, *layer.stride, *window, *shape.tile, plan.forward, plan.weights, plan.split, plan.inputs, *plan.tile]
        self.types.append(f"typedef Conv<Image{k}, Image{k + 1}, {', '.join(map(str, numbers))}, {block.activation}> Layer{k};")
        for name, group, inner, outer in (
            ("ahead", plan.forward, shape.outputs, shape.channels),
            ("back", plan.inputs, shape.channels, shape.outputs),
        ):
            self.sizes[f"{name}{k}"] = outer * shape.taps * -(-inner // group) * _padded(group) if group else 0
        if block.pool:
            self.sizes[f"place{k}"] = -(-block.out[0] * block.out[1] * block.out[2] * self.lanes // 4)
        self._scratch(plan.split * shape.outputs * (shape.channels * shape.taps + 1))

    def _conv(self, k: int, block: Block) -> None:
        layer, names = block.layer, self.memory.names
        place = f"(uint8_t*){names[f'place{k}']}" if block.pool else "nullptr"
        self.prepare.append(f"Layer{k}::pack(w + {layer.weight}, {names[f'ahead{k}']}, {names[f'back{k}']});")
        bias = "nullptr" if layer.bias < 0 else f"w + {layer.bias}"
        self.forward += [f"Layer{k}::forward({self.at(k)}, {names[f'ahead{k}']}, {bias}, {self.at(k + 1)}, {place});", "SYNC;"]
        back = [f"Layer{k}::weights({self.at(k)}, {self.at(k + 1)}, {place}, {names['scratch']});", "SYNC;"]
        if k:
            back += [f"Layer{k}::input<{self._below(k)}>({self.at(k + 1)}, {place}, {names[f'back{k}']}, {self.at(k)});", "SYNC;"]
        packed = f"{names[f'ahead{k}']}, {names[f'back{k}']}"
        back += [f"Layer{k}::apply({names['scratch']}, step, {layer.weight}, {layer.bias}, {packed});", "SYNC;"]
        self.backward.append(back)

    def _linear_buffers(self, k: int, block: Block) -> None:
        layer = block.layer
        inputs, outputs = layer.shape[0] * layer.shape[1] * layer.shape[2], layer.out[0]
        vector = inputs % 4 == 0 and layer.weight % 4 == 0
        plan = plan_linear(inputs, outputs, self.lanes, vector)
        numbers = f"{inputs}, {outputs}, {plan.group}, {plan.split}, {plan.split_input}, {str(vector).lower()}, {block.activation}"
        self.types.append(f"typedef Linear<{numbers}> Layer{k};")
        self._scratch(plan.split * outputs * self.lanes)
        self._scratch(plan.split_input * inputs * self.lanes if k else 0)

    def _linear(self, k: int, block: Block) -> None:
        layer, scratch = block.layer, self.memory.names["scratch"]
        weight, bias = f"w + {layer.weight}", "nullptr" if layer.bias < 0 else f"w + {layer.bias}"
        self.forward += [f"Layer{k}::forward({self.at(k)}, {weight}, {scratch});", "SYNC;"]
        self.forward += [f"Layer{k}::finish({scratch}, {bias}, {self.at(k + 1)});", "SYNC;"]
        apply = [f"Layer{k}::apply({self.at(k)}, {self.at(k + 1)}, step, {layer.weight}, {layer.bias});", "SYNC;"]
        if not k:
            self.backward.append(apply)
            return
        # The input is still needed for the gradient of the weights, and the weights change with it: its gradient waits in between.
        before = [f"Layer{k}::input({self.at(k + 1)}, {weight}, {scratch});", "SYNC;"]
        self.backward.append([*before, *apply, f"Layer{k}::finish_input<{self._below(k)}>({scratch}, {self.at(k)});", "SYNC;"])


def _padded(group: int) -> int:
    return {3: 4, 5: 6, 7: 8}.get(group, group)
