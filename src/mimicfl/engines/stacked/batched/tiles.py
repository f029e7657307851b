"""Tiles of the matrix products that compute wide convolutions. They follow from the shapes alone, never from timing."""

import torch

PROCESSORS = 132  # of an H200; a constant, so that the order of sums does not depend on the GPU


def product_tile(places: int, columns: int, products: int) -> tuple[int, int, int]:
    """Return the places and columns of a tile, and its warps: a large tile if every processor still gets several."""
    wide = block(columns)
    tall = 128 if -(-places // 128) * -(-columns // wide) * products >= 4 * PROCESSORS else 64
    return tall, wide, 8 if tall * wide >= 128 * 128 else 4


def product_depth(channels: int, dtype: torch.dtype) -> int:
    """Return the products summed per step: a divisor of the channels if possible, so that a step stays within one tap."""
    most = 64 if dtype == torch.bfloat16 else 32
    return next((k for k in (64, 32, 16) if k <= most and channels % k == 0), 32)


def weight_tiles(m: int, places: int, o: int, columns: int, dtype: torch.dtype) -> tuple[int, int, int, tuple[int, int, int]]:
    """Return the tiles of a weight gradient, the programs that share its sum, the steps of each, and the tile."""
    tall, wide, depth = block(o), block(columns), 64 if dtype == torch.bfloat16 else 32
    tiles = -(-o // tall) * -(-columns // wide)
    programs = (2 if tall == 128 else 8) * PROCESSORS  # enough to fill the GPU
    splits = max(1, min(-(-places // (8 * depth)), programs // (m * tiles)))
    steps = -(-places // (splits * depth))
    return tiles, -(-places // (steps * depth)), steps, (tall, wide, depth)


def block(size: int) -> int:
    """Return the smallest power of two that holds the size, between 16 and 128."""
    return min(128, max(16, 1 << (size - 1).bit_length()))


Tile = tuple[int, int, int, int, int]  # rows, columns, and warps over rows, over columns and over the summed entries
FLOAT_TILES: tuple[Tile, ...] = ((32, 48, 1, 1, 4), (32, 96, 1, 2, 4), (64, 64, 4, 2, 1), (32, 96, 2, 2, 2))


def float_tile(m: int, rows: int, columns: int, depth: int) -> Tile:
    """Return the tile of a float32 product. Warps share a long sum; for a short one they divide the tile."""
    small, long, wide, short = FLOAT_TILES
    if depth < 256:
        return wide if columns > 128 else short
    return long if m * -(-rows // long[0]) * -(-columns // long[1]) >= PROCESSORS else small
