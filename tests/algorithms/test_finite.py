"""Which rows of many tensors are finite."""

import numpy as np
import pytest
import torch

from mimicfl.algorithms.finite import finite_rows

BAD = (float("inf"), float("-inf"), float("nan"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_finite_if_all_their_entries_are(seed, dtype):
    rng = np.random.default_rng(seed)
    tensors = [torch.from_numpy(rng.standard_normal((m, n))).to(dtype) for m, n in rng.integers(1, 40, (6, 2))]
    for rows in tensors[: int(rng.integers(0, 6))]:
        for _ in range(int(rng.integers(0, 4))):
            rows[rng.integers(len(rows)), rng.integers(rows.shape[1])] = rng.choice(BAD)
    for rows, found in zip(tensors, finite_rows(tensors), strict=True):
        np.testing.assert_array_equal(found, [all(np.isfinite(row)) for row in rows.numpy()])


def test_opposite_infinities_are_not_finite():
    (found,) = finite_rows([torch.tensor([[float("inf"), float("-inf")], [1.0, -1.0]])])
    assert found.tolist() == [False, True]


def test_large_entries_are_finite_though_their_sum_is_not():
    (found,) = finite_rows([torch.tensor([[3e38, 3e38], [3e38, float("nan")]])])
    assert found.tolist() == [True, False]


def test_a_row_without_entries_is_finite():
    assert finite_rows([]) == []
    assert finite_rows([torch.zeros(2, 0)])[0].tolist() == [True, True]
