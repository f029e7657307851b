"""Small stored runs in float64: a change that moves results is seen, whatever else still passes."""

import json

import pytest

from .regenerate import CASES, FILE, measure

GOLDEN = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_stored(name):
    stored, now = GOLDEN[name], measure(CASES[name])
    assert now["clients"] == stored["clients"]
    for key in ("test_loss", "norm", "first"):
        assert now[key] == pytest.approx(stored[key], rel=1e-9, abs=1e-12)
