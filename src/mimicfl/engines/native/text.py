"""Pieces of generated C++."""

import math


def words(*items: object) -> str:
    return ", ".join(map(str, items))


def at(array: str, offset: int) -> str:
    return "nullptr" if offset < 0 else f"{array} + {offset}"


def size(shape: tuple[int, int, int]) -> int:
    return math.prod(shape)
