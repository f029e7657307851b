"""Chooses how the threads of a block share the work of a layer, from a model of a multiprocessor's time."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

THREADS = 384  # a multiple of 128; 168 registers per thread
REGISTERS = 65536 // THREADS - 8
SPARE = 28  # registers for addresses and counters
LATENCY = 300  # cycles of a phase's start and end
MOST_PARTS = 12_000  # floats for partial sums of weight gradients
Pair = tuple[int, int]


@dataclass(frozen=True)
class ConvShape:
    """A convolution with the max pooling that follows it; without pooling the window is 1 x 1."""

    channels: int
    outputs: int
    kernel: Pair
    stride: Pair
    pool: Pair
    below: Pair  # height and width of the input, without padding
    above: Pair  # height and width after pooling

    @property
    def tile(self) -> Pair:
        """Pooling windows per thread, so that a thread always computes several neighbouring positions."""
        return 1 if self.pool[0] > 1 else 2, 1 if self.pool[1] > 1 else 2

    @property
    def positions(self) -> Pair:
        return self.tile[0] * self.pool[0], self.tile[1] * self.pool[1]

    @property
    def patch(self) -> int:
        """Inputs that a tile depends on."""
        rows, columns = ((m - 1) * s + k for m, s, k in zip(self.positions, self.stride, self.kernel, strict=True))
        return rows * columns

    @property
    def tiles(self) -> int:
        return -(-self.above[0] // self.tile[0]) * -(-self.above[1] // self.tile[1])

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]


@dataclass(frozen=True)
class ConvPlan:
    """Channels per thread in each pass, the number of parts of the weight gradient's sums, and the pixels per thread in the gradient of the
    input. `inputs` is 0 if that pass is left out."""

    forward: int
    weights: int
    split: int
    inputs: int
    tile: Pair = (1, 1)


@dataclass(frozen=True)
class LinearPlan:
    """Outputs per thread, and the number of parts of the sums over the inputs and over the outputs."""

    group: int
    split: int
    split_input: int


def plan_conv(shape: ConvShape, lanes: int, needs_input: bool) -> ConvPlan:
    """Return the fastest division of the work, by the model."""
    forward = min(_forward(shape, lanes))[1]
    _, weights, split = min(_weights(shape, lanes))
    if not needs_input:
        return ConvPlan(forward, weights, split, 0)
    _, inputs, tile = min(_inputs(shape, lanes))
    return ConvPlan(forward, weights, split, inputs, tile)


def plan_linear(inputs: int, outputs: int, lanes: int, vector: bool) -> LinearPlan:
    """Split sums until all threads are busy; a part stays long enough to be worth its addition."""
    group = min(4, outputs)
    split = THREADS // (-(-outputs // group) * (lanes // 4))
    split_input = THREADS // (inputs // (4 if vector else 1) * (lanes // 4) or 1)
    return LinearPlan(group, max(1, min(16, split, inputs // 16)), max(1, min(16, split_input, outputs // 8)))


def _seconds(items: int, products: float, loads: float, other: float = 0.0) -> float:
    """Cycles of a phase. A multiprocessor starts four instructions per cycle; its loads take one cycle each."""
    warps = THREADS // 32
    whole, rest = divmod(items, THREADS)
    busy = whole * warps + max(-(-rest // 32), 8 if rest else 0)  # fewer than eight warps do not hide the latencies of each other
    return busy * max((products + loads + other) / 4, loads) + LATENCY * (whole + bool(rest))


def _wide(count: int) -> float:
    """Cycles of the loads of this many channels' weights: vector loads of up to four, by threads of two groups."""
    return 1.5 * -(-(count + count % 2) // 4)


def _forward(shape: ConvShape, lanes: int) -> Iterator[tuple[float, int]]:
    positions = shape.positions[0] * shape.positions[1]
    for count in range(1, min(shape.outputs, 8) + 1):
        groups = -(-shape.outputs // count)
        if count == 1 or count * positions + shape.patch + count + SPARE <= REGISTERS:
            conflict = 1 if groups % 2 == 0 else 2  # neighbouring groups read the same inputs, neighbouring tiles the same banks
            loads = shape.channels * (shape.patch * conflict + shape.taps * _wide(count))
            yield _seconds(lanes * groups * shape.tiles, shape.channels * shape.taps * count * positions, loads), count


def _weights(shape: ConvShape, lanes: int) -> Iterator[tuple[float, int, int]]:
    positions = shape.positions[0] * shape.positions[1]
    size = shape.outputs * (shape.channels * shape.taps + 1)
    for count in range(1, min(shape.outputs, 8) + 1):
        if count > 1 and count * (shape.taps + 1) + shape.patch + positions + SPARE > REGISTERS:
            continue
        items = lanes * shape.channels * -(-shape.outputs // count)
        for split in range(1, min(shape.tiles, 16, max(1, MOST_PARTS // size)) + 1):
            tiles = -(-shape.tiles // split)
            products = tiles * count * positions * (shape.taps + 1) + 2 * count * shape.taps
            loads = tiles * (shape.patch + 2 * count * shape.tile[0] * shape.tile[1])
            yield _seconds(items * split, products, loads, tiles * count * positions * 2), count, split


def _inputs(shape: ConvShape, lanes: int) -> Iterator[tuple[float, int, Pair]]:
    base = [side if side > 1 else 1 for side in shape.pool]
    sides = [
        sorted({step * times for times in (1, 2, 4) if step * times <= size + step} | ({-(-size // step) * step} if size <= 32 else set()))
        for step, size in zip(base, shape.below, strict=True)
    ]
    for count, rows, columns in product(range(1, min(shape.channels, 8) + 1), *sides):
        windows = [(n + k + p - 2) // p + 1 for n, k, p in zip((rows, columns), shape.kernel, shape.pool, strict=True)]
        registers = count * rows * columns + windows[1] * (shape.pool[1] + 2) + 2 * count + SPARE
        if registers > REGISTERS and (count, rows, columns) != (1, *base):
            continue
        down, across = -(-shape.below[0] // rows), -(-shape.below[1] // columns)
        inside = min(1.0, shape.above[0] * shape.pool[0] / (down * rows))  # rows of windows outside of the image are skipped
        wide = min(columns, shape.above[1] * shape.pool[1]) if across == 1 else columns
        products = shape.outputs * inside * rows * shape.taps * wide * count
        loads = shape.outputs * inside * (2 * windows[0] * windows[1] + rows * shape.taps * _wide(count))
        other = shape.outputs * inside * 2 * windows[0] * windows[1] * shape.pool[0] * shape.pool[1]
        items = lanes * -(-shape.channels // count) * down * across
        yield _seconds(items, products, loads, other), count, (rows, columns)
