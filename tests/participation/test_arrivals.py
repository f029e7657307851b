"""The order of events in asynchronous training equals that of a second simulation, which goes through every moment one after another."""

import numpy as np
import pytest

from mimicfl.participation.asynchronous import Buffered, arrivals


def moments(k, seconds, available, length, steps):
    """Clients as words and numbers: `ends` of those that train, `version` they train from, the buffer as a list."""
    n, now, tick, version = len(seconds), 0.0, 0, 0
    ends, began, buffer, found = {}, {}, [], []
    while len(found) < steps:
        for i in range(n):
            if available[tick % len(available), i] and i not in ends and i not in buffer:
                ends[i], began[i] = now + seconds[i], version
        first = min(ends, key=ends.get, default=None)
        if first is None or ends[first] >= (tick + 1) * length:  # the next round of the pattern comes before the next arrival
            tick += 1
            now = max(now, tick * length)
            continue
        now = ends.pop(first)
        buffer.append(first)
        if len(buffer) == k:
            found.append((sorted(buffer), [began[i] for i in sorted(buffer)], now))
            version, buffer = version + 1, []
    return found


@pytest.mark.parametrize("seed", range(30))
def test_arrivals_equal_a_second_simulation(seed):
    rng = np.random.default_rng(seed)
    n, k = int(rng.integers(2, 9)), int(rng.integers(1, 4))
    seconds, length = rng.lognormal(3, 1, n), float(rng.uniform(5, 60))
    available = rng.random((40, n)) < rng.uniform(0.2, 1.0)
    available[3] = True
    k = min(k, n)
    found = arrivals(Buffered(k), seconds, lambda tick: available[tick % 40], length, 40, seed)
    wanted = moments(k, seconds, available, length, 40)
    assert [c.tolist() for c in found.clients] == [clients for clients, _, _ in wanted]
    assert [v.tolist() for v in found.versions] == [versions for _, versions, _ in wanted]
    np.testing.assert_allclose(found.times, [time for _, _, time in wanted], rtol=1e-12)
    stale = np.array([t - v for t, versions in enumerate(found.versions) for v in versions])
    assert (stale >= 0).all()
