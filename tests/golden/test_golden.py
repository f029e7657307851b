"""Compares small float64 runs with stored results, to detect any change of results that other tests miss."""

import json

import pytest

from tests.golden.regenerate import CASES, FILE, measure

GOLDEN = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", CASES)
def test_results_equal_the_stored_ones(name):
    stored, now = GOLDEN[name], measure(CASES[name])
    assert now["clients"] == stored["clients"]
    for key in ("test_loss", "norm", "first"):
        assert now[key] == pytest.approx(stored[key], rel=1e-9, abs=1e-12)
