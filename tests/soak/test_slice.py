"""Runs a few fixed trials of every part of the soak."""

import pytest

from soak import table
from soak.parts import PARTS
from soak.runner import run

TRIALS = {"command lines": 40, "API calls": 120, "engine comparisons": 10, "kills": 2, "long runs": 2}


def test_every_part_has_trials_in_the_test_suite():
    assert TRIALS.keys() == PARTS.keys()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", TRIALS)
def test_first_trials_of_a_part_do_not_fail(part, tmp_path):
    outcomes = run({part: PARTS[part]}, 0, 0.0, TRIALS[part], tmp_path, lambda _: None, every=0.2)
    assert not table.failures(outcomes), "\n\n".join(table.failures(outcomes))
    assert [outcome.seed for outcome in outcomes] == list(range(TRIALS[part]))
    assert any(outcome.verdict == "ok" for outcome in outcomes)
