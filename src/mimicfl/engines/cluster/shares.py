"""Which clients of a round train together: a function of the round alone, so that a resumed run forms the same sums."""

import numpy as np

EVEN_ENOUGH = 1.25  # how much longer than the mean the longest group may be before clients leave their home


def divide(active: np.ndarray, sizes: np.ndarray, groups: int) -> list[np.ndarray]:
    """Divide the rows of `active` into groups, some possibly empty: client i goes to group i mod `groups`, where its samples are.

    If a group would take much longer than the others, some of its clients move to the group with the least to do.
    """
    found: list[list[int]] = [[] for _ in range(groups)]
    for row, client in enumerate(active):
        found[int(client) % groups].append(row)
    load = np.array([float(sizes[rows].sum()) for rows in found])
    while load.max() > EVEN_ENOUGH * load.mean():
        longest, shortest = int(load.argmax()), int(load.argmin())
        moved = found[longest][-1]
        if load[shortest] + sizes[moved] >= load[longest]:
            break
        found[shortest].append(found[longest].pop())
        load[longest] -= sizes[moved]
        load[shortest] += sizes[moved]
    return [np.array(sorted(rows), dtype=int) for rows in found]
