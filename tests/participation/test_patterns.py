"""Availability patterns: their statistics, reproducibility by seed, consistency over lengths, and error messages."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mimicfl as mf
from mimicfl import participation as av

COUNTS = np.eye(4, dtype=int)[np.arange(12) % 4] * 10  # twelve clients, one class each
SPECS = [
    "always",
    "bounded:7",
    "bounded:7,phase=random",
    "bounded:7,gaps=half-normal",
    "static:0.3",
    "time-varying:0.25",
    "markov:0.2,0.4",
    "cyclic:9,3",
    "label-correlated:classes=[0,1],rare=0.1,common=0.6",
    "dirichlet:0.3,mean=0.4",
    "dirichlet:0.3,mean=0.4,labels=true",
    "lognormal:1,mean=0.4",
    "sine:0.5",
    "sine:0.5,alpha=0.5,labels=true",
    "interleaved-sine:0.5,alpha=1",
    "staircase:0.5",
    "outages:3",
    "outages:3,p=0.7,by=labels",
    "circles:3,on=2",
    "circles:4,by=labels,p=0.8",
]


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
@given(rounds=st.integers(1, 40), more=st.integers(0, 30), seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_longer_schedule_starts_with_the_shorter_one(spec, rounds, more, seed):
    pattern = av.make(spec)
    short = av.schedule(pattern, rounds, 12, seed, COUNTS)
    long = av.schedule(pattern, rounds + more, 12, seed, COUNTS)
    assert short.dtype == bool
    assert short.shape == (rounds, 12)
    np.testing.assert_array_equal(long[:rounds], short)


@pytest.mark.parametrize("spec", SPECS[1:])
def test_schedule_depends_only_on_the_seed(spec):
    a, b, c = (av.schedule(av.make(spec), 60, 12, seed, COUNTS) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()


@pytest.mark.parametrize("spec", SPECS)
def test_warm_start_makes_all_clients_participate_in_round_zero(spec):
    separator = "," if ":" in spec else ":"
    warm = av.schedule(av.make(spec + separator + "warm_start=true"), 20, 12, 3, COUNTS)
    assert warm[0].all()
    np.testing.assert_array_equal(warm[1:], av.schedule(av.make(spec), 20, 12, 3, COUNTS)[1:])


@given(
    tau=st.integers(0, 30),
    seed=st.integers(0, 1000),
    phase=st.sampled_from(["aligned", "random"]),
    gaps=st.sampled_from(["uniform", "half-normal"]),
)
@settings(max_examples=40, deadline=None)
def test_bounded_is_periodic_and_bounded(tau, seed, phase, gaps):
    available = av.schedule(av.Bounded(tau, phase, gaps), 100, 8, seed)
    assert av.observe(available).tau_max <= max(tau, 1)
    for i in range(8):
        gaps = np.diff(np.flatnonzero(available[:, i]))
        assert len(set(gaps.tolist())) <= 1
    if phase == "aligned":
        assert available[0].all()


def test_bounded_periods_are_uniform_including_zero():
    """Two of the 21 values 0..20 mean every round."""
    available = av.schedule(av.Bounded(20), 21, 4000, seed=0)
    every = available.all(axis=0).mean()
    assert abs(every - 2 / 21) < 0.015
    slowest = (available[1:20].sum(axis=0) == 0).mean()  # period 20
    assert abs(slowest - 1 / 21) < 0.015


def test_half_normal_gaps_are_short():
    """|3 z| rounds to 0 or 1 if |z| < 1/2, and to 2 if |z| is between 1/2 and 5/6."""
    available = av.schedule(av.Bounded(20, gaps="half-normal"), 24, 4000, seed=0)
    assert abs(available.all(axis=0).mean() - 0.383) < 0.02
    second = (available[::2].all(axis=0) & ~available[1::2].any(axis=0)).mean()
    assert abs(second - 0.212) < 0.02
    np.testing.assert_array_equal(available, av.schedule(av.Bounded(100, gaps="half-normal"), 24, 4000, seed=0))


def test_static_clients_participate_with_probability_p():
    available = av.schedule(av.Static(0.3), 400, 50, seed=1)
    assert abs(available.mean() - 0.3) < 0.01
    each = av.schedule(av.Static([0.0, 1.0, 0.5]), 2000, 3, seed=1).mean(axis=0)
    assert each[0] == 0
    assert each[1] == 1
    assert abs(each[2] - 0.5) < 0.05


def test_time_varying_selects_a_fixed_number_of_clients():
    available = av.schedule(av.TimeVarying(0.1), 300, 30, seed=2)
    assert (available.sum(axis=1) == 3).all()
    assert abs(available.mean(axis=0) - 0.1).max() < 0.07


@pytest.mark.slow
def test_time_varying_follows_its_weights():
    """If one of two clients is selected, the first one is selected with probability a_1/(a_1+a_2)."""
    from mimicfl.seeds import stream

    expected = 0.0
    for t in range(4000):
        weight = stream(9, "availability", t).uniform(1, 10, size=2)
        expected += weight[0] / weight.sum()
    wins = av.schedule(av.TimeVarying(0.5), 4000, 2, seed=9)[:, 0].sum()
    heavier = [stream(9, "availability", t).uniform(1, 10, size=2).argmax() for t in range(4000)]
    chosen = av.schedule(av.TimeVarying(0.5), 4000, 2, seed=9).argmax(axis=1)
    assert abs(wins - expected) < 120  # about four standard deviations
    assert (chosen == heavier).mean() > 0.6


def test_markov_is_stationary_and_sticky():
    available = av.schedule(av.Markov(0.1, 0.3), 3000, 40, seed=0)
    assert abs(available.mean() - 0.25) < 0.01
    dropped_out = (~available[1:] & available[:-1]).sum() / available[:-1].sum()
    reconnected = (available[1:] & ~available[:-1]).sum() / (~available[:-1]).sum()
    assert abs(dropped_out - 0.3) < 0.01
    assert abs(reconnected - 0.1) < 0.01


def test_cyclic_clients_are_active_for_on_rounds_per_period():
    available = av.schedule(av.Cyclic(10, 3), 40, 20, seed=0)
    for start in range(30):
        assert (available[start : start + 10].sum(axis=0) == 3).all()
    assert len(np.unique(available.argmax(axis=0))) > 3


def test_label_correlated_clients_participate_by_their_classes():
    available = av.schedule(av.LabelCorrelated([0, 1], rare=0.05, common=0.6), 3000, 12, 0, COUNTS)
    holders = np.isin(np.arange(12) % 4, [0, 1])
    assert abs(available[:, holders].mean() - 0.05) < 0.01
    assert abs(available[:, ~holders].mean() - 0.6) < 0.02


@pytest.mark.parametrize("kind", ["npy", "csv", "txt", "json"])
def test_explicit_reads_files(tmp_path, kind):
    matrix = np.random.default_rng(0).random((6, 4)) < 0.5
    file = tmp_path / f"schedule.{kind}"
    if kind == "npy":
        np.save(file, matrix)
    elif kind == "json":
        file.write_text(json.dumps(matrix.astype(int).tolist()))
    else:
        file.write_text("# schedule\n" + "\n".join(("," if kind == "csv" else " ").join(map(str, row)) for row in matrix.astype(int)))
    np.testing.assert_array_equal(av.schedule(av.make(f"explicit:{file}"), 6, 4), matrix)


def test_explicit_never_unpickles(tmp_path):
    file = tmp_path / "bad.npy"
    np.save(file, np.array([[{}]], dtype=object), allow_pickle=True)
    with pytest.raises(mf.UsageError, match="cannot read"):
        av.make(f"explicit:{file}")


def test_custom_pattern_defines_only_draw():
    class EveryOther(av.Pattern):
        def draw(self, rounds, num_clients, seed, class_counts):
            return (np.arange(rounds)[:, None] + np.arange(num_clients)) % 2 == 0

    assert av.schedule(EveryOther(warm_start=True), 3, 2).tolist() == [[True, True], [False, True], [True, False]]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("boundd:3", "did you mean 'bounded'"),
        ("bounded:-1", "at least 0"),
        ("bounded:2.5", "whole number"),
        ("bounded:5,phase=late", "phase 'late' is unknown"),
        ("bounded:5,gaps=long", "gaps 'long' is unknown"),
        ("bounded:5,speed=3", "no option 'speed'"),
        ("bounded:5,6,7,8", "too many"),
        ("bounded:5,tau_max=6", "twice"),
        ("bounded:tau_max=6,7", "follows a named one"),
        ("static:1.5", r"\[0, 1\]"),
        ("static:abc", r"\[0, 1\]"),
        ("static:NaN", r"\[0, 1\]"),
        ("static:[0.1,2]", r"\[0, 1\]"),
        ("time-varying:-0.1", r"\[0, 1\]"),
        ("markov:0,0", "up or down"),
        ("cyclic:3,5", "longer than period"),
        ("cyclic:0", "at least 1"),
        ("label-correlated:classes=3", "list of labels"),
        ("label-correlated:classes=[true]", "label in classes"),
        ("label-correlated:classes=[0,0]", "each label once"),
        ('label-correlated:classes={"a":1}', "list of labels"),
        ("static:p=0.5,p=0.6", "twice"),
        ("static:0.5,0.5", "too many"),
        ("always:warm_start=yes", "true or false"),
        ("bounded:1000000000000000000000", "at most"),
        ("explicit", "needs a matrix"),
        ("explicit:nowhere.csv", "cannot read"),
    ],
)
def test_invalid_specs_raise_usage_error(spec, words):
    with pytest.raises(mf.UsageError, match=words):
        av.make(spec)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (av.TimeVarying(0.01), "raise P"),
        (av.Static([0.1, 0.2]), "2 probabilities for 12"),
        (av.LabelCorrelated([9]), "class 9 is not in the data"),
        (av.Explicit(np.ones((5, 3), bool)), "3 clients but 12"),
        (av.Explicit(np.ones((2, 12), bool)), "has 2 rounds"),
    ],
)
def test_patterns_that_do_not_fit_the_run_raise_usage_error(pattern, words):
    with pytest.raises(mf.UsageError, match=words):
        av.schedule(pattern, 5, 12, 0, COUNTS)


def test_explicit_accepts_only_a_matrix_of_zeros_and_ones():
    with pytest.raises(mf.UsageError, match="0 and 1"):
        av.Explicit([[0, 2]])
    with pytest.raises(mf.UsageError, match="rounds x clients"):
        av.Explicit([1, 0])


def test_observe_small_schedule():
    schedule = np.array([[1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 1, 0]], bool)
    seen = av.observe(schedule)
    assert seen.tau_max == 3  # client 0 between rounds 0 and 3; client 2 never participates and is counted separately
    assert seen.empty_rounds == 1
    assert seen.never_seen == 1
    assert seen.all_seen_at is None
    assert sorted(seen.gaps.tolist()) == [1, 2, 3]
    assert seen.participation.tolist() == [0.5, 0.75, 0]
    assert seen.active_per_round.tolist() == [2, 1, 0, 2]
    assert any("1 client never participates" in line for line in seen.sentences())
    assert av.observe(schedule[:, :2]).all_seen_at == 0


@pytest.mark.slow
@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=20))
def test_observe_agrees_with_naive_counting(rows):
    schedule = np.array(rows)
    seen = av.observe(schedule)
    longest = before = 0
    for i in range(3):
        since = 0
        for t in range(len(rows)):
            since += 1
            longest = max(longest, since)
            if schedule[t, i]:
                since = 0
        longest = max(longest, since + 1) if schedule[:, i].any() else before
        before = longest
    assert seen.tau_max == longest
    assert seen.sentences()


def test_error_for_an_explicit_schedule_does_not_mention_a_partition(tmp_path):
    """A schedule can be displayed without any partition."""
    file = tmp_path / "f.csv"
    file.write_text("1,0\n0,1\n")
    with pytest.raises(mf.UsageError, match="2 clients but 30") as raised:
        av.schedule(f"explicit:{file}", 2, 30)
    assert "partition" not in str(raised.value)


def test_empty_file_raises_usage_error(tmp_path):
    (tmp_path / "empty.npy").write_bytes(b"")
    with pytest.raises(mf.UsageError, match="cannot read"):
        av.make(f"explicit:{tmp_path / 'empty.npy'}")


def test_static_copies_its_probabilities():
    given = [0.0, 1.0]
    pattern = av.Static(given)
    given[0] = 1.0
    assert pattern.p == [0.0, 1.0]


@pytest.mark.parametrize("wrong", [3, [[1, 2]], np.ones((4, 2)), [[1], [1, 2]], torch.zeros(2, device="meta")], ids=str)
def test_invalid_class_counts_raise_usage_error(wrong):
    with pytest.raises(mf.UsageError, match="class_counts"):
        av.schedule(av.LabelCorrelated([0]), 3, 4, 0, wrong)


@pytest.mark.parametrize("wrong", [None, 3, [[True]], np.ones((2, 2)), np.ones(3, bool)], ids=str)
def test_observe_accepts_only_bool_arrays(wrong):
    with pytest.raises(mf.UsageError, match="bool array"):
        av.observe(wrong)
