"""Available -> selected -> finished in time: a naive loop agrees, and mistakes are refused."""

import numpy as np
import pytest

import mimicfl as mf
from mimicfl import participation as av
from mimicfl.participation import distributions, selection
from mimicfl.participation.rates import EstimatedRates, known_rates
from mimicfl.participation.run_schedule import participation
from mimicfl.participation.selection import Candidates
from mimicfl.participation.stages import Stages
from tests.conftest import make_run

SIZES = np.array([10, 20, 30, 40, 50, 60, 70, 80])
NEED = np.array([4.0, 1.0, 3.0, 9.0, 2.0, 8.0, 5.0, 7.0])


def candidates(t=0, available=None, losses=None):
    here = np.arange(8) if available is None else np.asarray(available)
    return Candidates(t, here, SIZES, seed=3, losses=losses or (lambda clients: clients.astype(float)))


def naive_round(select, available, need, deadline):
    """One round written out: who is selected, who is late, who is counted, how long it takes."""
    selected = sorted(select)
    late = [i for i in selected if deadline is not None and need[i] > deadline]
    finished = sorted((i for i in selected if i not in late), key=lambda i: (need[i], i))
    return selected, late, finished


@pytest.mark.parametrize("deadline", [None, 5.0, 1.5])
@pytest.mark.parametrize("spec", ["all", "uniform:3", "by-samples:4", "over-select:3,1.6"])
def test_rounds_agree_with_a_naive_loop(spec, deadline):
    select = selection.make(spec)
    stages = Stages(select, NEED, deadline, SIZES, seed=3)
    available = av.schedule("static:0.6", 40, 8, 1)
    for t, row in enumerate(available):
        here = np.flatnonzero(row)
        seen = stages.round(t, here, None)
        if not len(here):
            assert not len(seen.active)
            continue
        chosen = here if spec == "all" else select.choose(candidates(t, here))
        selected, late, finished = naive_round(chosen, here, NEED, deadline)
        k = select.first or len(selected)
        assert seen.selected.tolist() == selected
        assert seen.active.tolist() == sorted(finished[:k])
        assert (seen.late, seen.surplus) == (len(late), len(finished) - len(finished[:k]))
        enough = len(finished[:k]) == min(k, len(selected))
        assert seen.seconds == (max(NEED[finished[:k]]) if enough else deadline)
        counts = seen.columns(8)
        assert counts["available"] == len(here)
        assert sum(counts["missing"].values()) + len(seen.active) == 8


def test_without_selection_and_deadline_the_schedule_is_that_of_the_pattern():
    available = av.schedule("static:0.4", 50, 8, 2)
    assert Stages().schedule(available) is available
    found = participation(av.make("static:0.4"), Stages(), 8, 2, None, 50, None, 1)
    np.testing.assert_array_equal(found.active, available)


@pytest.mark.slow
def test_uniform_selection_is_uniform_and_takes_all_if_there_are_too_few():
    select = selection.make("uniform:3")
    picked = np.stack([np.isin(np.arange(8), select.choose(candidates(t))) for t in range(4000)])
    assert (picked.sum(axis=1) == 3).all()
    np.testing.assert_allclose(picked.mean(axis=0), 3 / 8, atol=0.04)
    assert sorted(select.choose(candidates(0, [2, 5]))) == [2, 5]


@pytest.mark.slow
def test_selection_by_samples_draws_in_proportion():
    first = np.array([selection.BySamples(1).choose(candidates(t))[0] for t in range(6000)])
    np.testing.assert_allclose(np.bincount(first, minlength=8) / 6000, SIZES / SIZES.sum(), atol=0.025)


def test_power_of_choice_takes_the_largest_losses_among_its_candidates():
    asked = []

    def losses(clients):
        asked.append(clients.tolist())
        return -clients.astype(float)  # the lowest numbers have the largest losses

    picked = selection.make("power-of-choice:2,candidates=5").choose(candidates(7, losses=losses))
    assert len(asked[0]) == 5
    assert sorted(picked) == sorted(asked[0])[:2]
    assert len(selection.make("power-of-choice:2").choose(candidates(0, [4]))) == 1


def test_uploads_count_only_rounds_in_which_somebody_finishes():
    stages = Stages(av.Uniform(1), NEED, 4.5, SIZES, 0)
    found = participation(av.make("always"), stages, 8, 0, None, None, 20, 1)
    assert found.active.any(axis=1).sum() == 20
    assert len(found.active) > 20
    assert found.active[-1].any()


@pytest.mark.parametrize("spec", ["constant:3", "lognormal:3,0.5", "uniform:1,3", "pareto:3,1.5", "7.5"])
def test_distributions_are_reproducible_and_positive(spec):
    made = distributions.make("speed", spec)
    a, b, c = (distributions.drawn("speed", made, 500, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert (a > 0).all()
    assert spec in ("constant:3", "7.5") or (a != c).any()


def test_distributions_follow_their_definitions():
    lognormal = distributions.drawn("speed", distributions.make("speed", "lognormal:3,0.5"), 20000, 0)
    assert np.median(lognormal) == pytest.approx(3, rel=0.02)
    assert np.log(lognormal).std() == pytest.approx(0.5, rel=0.02)
    slow = distributions.drawn("speed", distributions.make("speed", "pareto:3,1.5"), 20000, 0)
    assert slow.max() <= 3
    assert (slow < 3 / 4).mean() == pytest.approx(4**-1.5, abs=0.01)


@pytest.mark.parametrize("spec", ["0", "-3", "nan", "inf"])
def test_a_speed_that_is_no_speed_is_named(spec):
    with pytest.raises(mf.UsageError, match="speed must be"):
        distributions.make("speed", spec)


def test_speeds_from_a_file(tmp_path):
    (tmp_path / "speeds.csv").write_text("# samples per second\n10\n20\n30\n")
    made = distributions.make("speed", f"file:{tmp_path / 'speeds.csv'}")
    assert distributions.drawn("speed", made, 3, 0).tolist() == [10, 20, 30]
    with pytest.raises(mf.UsageError, match="3 values for 4 clients"):
        distributions.drawn("speed", made, 4, 0)
    (tmp_path / "bad.csv").write_text("10\n-1\n")
    with pytest.raises(mf.UsageError, match=r"above 0.*client 1"):
        distributions.drawn("speed", distributions.make("speed", f"file:{tmp_path / 'bad.csv'}"), 2, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "always",
        "bounded:7,phase=random",
        "static:0.3",
        "time-varying:0.25",
        "markov:0.2,0.4",
        "cyclic:9,3",
        "label-correlated:classes=[0,1],rare=0.1,common=0.6",
        "dirichlet:0.3,mean=0.4",
        "sine:0.5,alpha=0.5",
        "outages:3",
        "circles:3,p=0.8",
    ],
)
def test_known_rates_are_those_of_a_long_schedule(spec):
    counts = np.eye(4, dtype=int)[np.arange(12) % 4] * 10
    pattern = av.make(spec)
    rates = known_rates(pattern, Stages(), 12, 0, counts)
    seen = av.schedule(pattern, 6000, 12, 0, counts).mean(axis=0)
    np.testing.assert_allclose(rates, seen, atol=0.06)


def test_known_rates_of_clients_that_are_late_in_every_round_are_zero():
    pattern, counts = av.make("static:0.4"), np.ones((4, 2), dtype=int)
    stages = Stages(seconds=np.array([1.0, 3.0, 2.0, 9.0]), deadline=2.0)
    assert known_rates(pattern, stages, 4, 0, counts) == pytest.approx([0.4, 0.0, 0.4, 0.0])
    with pytest.raises(mf.UsageError, match=r"selection.*estimated"):
        known_rates(pattern, Stages(selection=selection.make("uniform:2")), 4, 0, counts)


def test_estimated_rates_count_the_rounds_so_far():
    estimate = EstimatedRates(4)
    rows = [{"clients": [0, 1]}, {"clients": [1]}]
    assert estimate.update(rows[:1], np.array([1])).tolist() == [1.0]
    assert estimate.update(rows, np.array([0, 1, 3])).tolist() == pytest.approx([2 / 3, 1, 1 / 3])


def test_a_forced_first_round_says_nothing_about_the_rates():
    estimate = EstimatedRates(3, forced=1)
    rows = [{"clients": [0, 1, 2]}, {"clients": [1]}, {"clients": []}]
    assert estimate.update([], np.array([0, 1, 2])).tolist() == [1.0, 1.0, 1.0]
    assert estimate.update(rows[:1], np.array([1])).tolist() == [1.0]
    assert estimate.update(rows, np.array([0, 1])).tolist() == pytest.approx([1 / 3, 2 / 3])
    resumed = EstimatedRates(3, forced=1)
    assert resumed.update(rows, np.array([0, 1])).tolist() == pytest.approx([1 / 3, 2 / 3])


def test_a_run_with_a_forced_first_round_estimates_without_it(quadratic):
    run = make_run(**quadratic, algorithm="known-p", availability="static:0.5,warm_start=true", participation_rates="estimated", rounds=4)
    run.recorder.rows = [{"clients": list(range(6))}, {"clients": [1]}]
    assert run.server.participation_rates(np.array([0, 1])).tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("uniform:0", "at least 1"),
        ("unifrm:3", "did you mean 'uniform'"),
        ("over-select:3,0.5", "at least 1"),
        ("power-of-choice:5,candidates=3", "at least k"),
    ],
)
def test_invalid_selections_raise_usage_error(spec, words):
    with pytest.raises(mf.UsageError, match=words):
        selection.make(spec)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (Stages(av.Uniform(9)), "only 8"),
        (Stages(av.OverSelect(7), NEED), "only 8"),
        (Stages(av.PowerOfChoice(2, candidates=9)), "only 8"),
        (Stages(av.OverSelect(3)), "speed"),
        (Stages(deadline=3.0), "take time"),
        (Stages(seconds=NEED, deadline=0.5), "fastest needs 1 s"),
        (Stages(seconds=NEED, deadline=20.0, round_seconds=10.0), "longer than a round"),
    ],
)
def test_stages_that_cannot_work_raise_usage_error(stages, words):
    with pytest.raises(mf.UsageError, match=words):
        participation(av.make("always"), stages, 8, 0, None, 3, None, 1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda c: "x", "client numbers"),
        (lambda c: [0.5], "client numbers"),
        (lambda c: [1, 1], "twice"),
        (lambda c: [7], "not available"),
    ],
)
def test_a_function_that_selects_nonsense_raises_usage_error(function, words):
    with pytest.raises(mf.UsageError, match=words):
        Stages(selection.make(function), sizes=SIZES).round(0, np.array([0, 1, 2]), None)


def test_select_must_be_a_selection():
    with pytest.raises(mf.UsageError, match="select must be"):
        selection.make(3)
