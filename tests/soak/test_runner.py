"""The runner of the soak reports a table of outcomes, however a part behaves."""

import pytest

from soak import table
from soak.parts import Entry
from soak.runner import run
from tests.soak.odd_part import DIES, FAILS, HANGS, NOTHING


def found(tmp_path, seed, trials=3, patience=10.0):
    return run({"odd": Entry("tests.soak.odd_part", patience=patience)}, seed, 0.0, trials, tmp_path, lambda _: None, every=0.05)


def test_trials_are_counted_and_have_consecutive_seeds(tmp_path):
    outcomes = found(tmp_path, FAILS)
    assert [outcome.seed for outcome in outcomes] == [FAILS, FAILS + 1, FAILS + 2]
    assert table.lines(outcomes, ["odd"])[0] == ("odd", "3", "1", "0", "2", "good 1")


def test_failures_of_the_same_kind_are_grouped_with_a_reproduction(tmp_path):
    (paragraph,) = table.failures(found(tmp_path, FAILS))
    assert f"{FAILS + 1}, {FAILS + 2}" in paragraph
    assert "do it again" in paragraph
    assert "very bad" in table.markdown(found(tmp_path, FAILS), ["odd"], "heading")


@pytest.mark.parametrize(("seed", "reason", "last"), [(DIES, "ended with 7", DIES + 1), (NOTHING, "no trial", NOTHING)])
def test_part_that_crashes_or_does_nothing_fails(tmp_path, seed, reason, last):
    failed = [outcome for outcome in found(tmp_path, seed) if outcome.verdict == "failed"]
    assert [outcome.seed for outcome in failed] == [last]
    assert reason in failed[0].detail


def test_crashed_part_continues_with_the_next_seed(tmp_path):
    outcomes = run({"odd": Entry("tests.soak.odd_part")}, DIES, 60.0, 3, tmp_path, lambda _: None, every=0.05)
    assert [outcome.seed for outcome in outcomes] == [DIES, DIES + 1, DIES + 2, DIES + 3, DIES + 4]


@pytest.mark.slow
def test_part_that_hangs_is_ended_and_fails(tmp_path):
    last = found(tmp_path, HANGS, patience=0.05)[-1]
    assert (last.verdict, "no outcome" in last.detail) == ("failed", True)
    assert last.seed in (HANGS, HANGS + 1)  # before or after its first trial, depending on the machine


def test_missing_module_fails(tmp_path):
    (outcome,) = run({"odd": Entry("tests.soak.nowhere")}, 0, 0.0, 1, tmp_path, lambda _: None, every=0.05)
    assert outcome.verdict == "failed"
    assert "nowhere" in outcome.detail
