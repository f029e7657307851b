"""A few trials of every part of the soak, always the same."""

import pytest

from soak import table
from soak.parts import PARTS
from soak.runner import run

TRIALS = {"command lines": 60, "API calls": 150, "engine comparisons": 12, "kills": 3, "long runs": 3}


def test_every_part_has_a_slice():
    assert TRIALS.keys() == PARTS.keys()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", TRIALS)
def test_a_slice_has_no_failure(part, tmp_path):
    outcomes = run({part: PARTS[part]}, 0, 0.0, TRIALS[part], tmp_path, lambda _: None, every=0.2)
    assert not table.failures(outcomes), "\n\n".join(table.failures(outcomes))
    assert [outcome.seed for outcome in outcomes] == list(range(TRIALS[part]))
    assert any(outcome.verdict == "ok" for outcome in outcomes)
