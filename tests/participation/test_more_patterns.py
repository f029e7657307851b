"""Patterns of the literature beyond the MimiC paper: their statistics follow their definitions."""

import numpy as np
import pytest

import mimicfl as mf
from mimicfl import participation as av

COUNTS = np.eye(4, dtype=int)[np.arange(12) % 4] * 10  # twelve clients, one class each
MIXED = np.random.default_rng(0).integers(0, 30, size=(200, 10))


@pytest.mark.parametrize("spec", ["dirichlet:0.1", "dirichlet:0.3,labels=true", "lognormal:1.5", "lognormal:0.5,labels=true"])
def test_probabilities_have_the_given_mean_and_bounds(spec):
    pattern = av.make(f"{spec},mean=0.2,least=0.05")
    p = pattern.probabilities(200, 3, MIXED)
    assert p.mean() == pytest.approx(0.2, abs=1e-9)
    assert p.min() >= 0.05
    assert p.max() <= 1
    available = av.schedule(pattern, 4000, 200, 3, MIXED)
    assert np.abs(available.mean(axis=0) - p).max() < 0.04  # five standard deviations


def test_a_smaller_alpha_spreads_the_probabilities_more():
    spread = [av.Dirichlet(alpha, least=0.0).probabilities(400, 0).std() for alpha in (0.1, 1.0, 10.0)]
    assert spread[0] > 2 * spread[1] > 4 * spread[2]


def test_lognormal_probabilities_have_the_given_sigma():
    p = av.Lognormal(0.5, mean=0.05).probabilities(20000, 1)
    assert np.log(p).std() == pytest.approx(0.5, abs=0.01)
    assert (av.Lognormal(0.0, mean=0.3).probabilities(5, 0) == 0.3).all()


def test_with_labels_a_client_has_the_mean_weight_of_its_samples():
    """Wang and Ji: p_i is proportional to the inner product of the class weights and the client's label distribution."""
    from mimicfl.seeds import stream

    q = stream(5, "participation probabilities").dirichlet(np.full(10, 1.0))
    inner = (MIXED / MIXED.sum(axis=1, keepdims=True)) @ q
    p = av.Dirichlet(1.0, mean=0.1, least=0.0, labels=True).probabilities(200, 5, MIXED)
    np.testing.assert_allclose(p / p.sum(), inner / inner.sum(), rtol=1e-6)


def test_clients_with_the_same_labels_have_the_same_probability():
    p = av.Dirichlet(0.5, labels=True).probabilities(12, 0, COUNTS)
    assert all(len(set(p[k::4])) == 1 for k in range(4))
    assert len(set(p)) > 1


def test_a_mean_that_few_weights_cannot_reach_is_reached_all_the_same():
    weights = np.array([0.0, 0.0, 0.0, 1.0])
    from mimicfl.participation.heterogeneous import scaled

    assert scaled(weights, 0.5, 0.0).mean() == pytest.approx(0.5)
    assert scaled(weights, 0.2, 0.0).tolist() == pytest.approx([0, 0, 0, 0.8])


def test_sine_follows_its_formula():
    available = av.schedule(av.Sine(p=0.6, period=20, gamma=0.3), 4000, 50, 0)
    t = np.arange(20)
    seen = available.reshape(200, 20, 50).mean(axis=(0, 2))
    np.testing.assert_allclose(seen, 0.6 * (0.3 * np.sin(2 * np.pi * t / 20) + 0.7), atol=0.025)


def test_staircase_has_two_levels():
    available = av.schedule(av.Staircase(p=0.5, period=20, low=0.4), 2000, 50, 0).reshape(100, 20, 50)
    assert available[:, :10].mean() == pytest.approx(0.5, abs=0.01)
    assert available[:, 10:].mean() == pytest.approx(0.2, abs=0.01)


def test_interleaved_sine_is_a_sine_with_a_cutoff():
    sine, cut = av.Sine(p=0.2, alpha=0.5), av.InterleavedSine(p=0.2, alpha=0.5, cutoff=0.1)
    p = sine.probabilities(40, 30, 1)
    np.testing.assert_array_equal(cut.probabilities(40, 30, 1), np.where(p < 0.1, 0, p))
    assert ((p > 0) & (p < 0.1)).any()
    a, b = (av.schedule(pattern, 40, 30, 1) for pattern in (sine, cut))
    np.testing.assert_array_equal(a & (p >= 0.1), b)


@pytest.mark.slow
def test_outages_take_whole_groups():
    pattern = av.Outages(groups=3, up=0.2, down=0.1)
    available = av.schedule(pattern, 3000, 12, 0)
    group = pattern.members(12, 0)
    assert np.bincount(group).tolist() == [4, 4, 4]
    for g in range(3):
        mine = available[:, group == g]
        assert (mine == mine[:, :1]).all()
    assert available.mean() == pytest.approx(2 / 3, abs=0.05)
    one = available[:, group == 0][:, 0]
    assert (one[:-1] & ~one[1:]).sum() / one[:-1].sum() == pytest.approx(0.1, abs=0.03)
    assert not np.array_equal(available[:, group == 0][:, 0], available[:, group == 1][:, 0])
    half = av.schedule(av.Outages(groups=3, up=0.2, down=0.1, p=0.5), 3000, 12, 0)
    assert half[available].mean() == pytest.approx(0.5, abs=0.02)
    assert not half[~available].any()


def test_circles_take_turns_and_never_meet():
    pattern = av.Circles(groups=4, on=3)
    available = av.schedule(pattern, 48, 10, 2)
    group = pattern.members(10, 2)
    for t in range(48):
        assert set(group[available[t]]) == {t // 3 % 4}
        assert available[t].sum() == (group == t // 3 % 4).sum()


def test_groups_by_labels_hold_the_same_classes():
    group = av.Circles(groups=4, by="labels").members(12, 0, COUNTS)
    classes = COUNTS.argmax(axis=1)
    assert all(len(set(classes[group == g])) == 1 for g in range(4))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dirichlet:0", "more than 0"),
        ("dirichlet:0.1,mean=0.1,least=0.2", "least"),
        ("dirichlet:labels=1", "true or false"),
        ("lognormal:-1", "at least 0"),
        ("sine:gamma=0.7", "0.5"),
        ("sine:labels=true", "alpha above 0"),
        ("sine:period=1", "at least 2"),
        ("staircase:low=1", "less than 1"),
        ("interleaved-sine:cutoff=2", r"\[0, 1\]"),
        ("outages:up=0,down=0", "up or down"),
        ("outages:by=size", "by 'size' is unknown"),
        ("circles:0", "at least 1"),
        ("circles:on=0", "at least 1"),
    ],
)
def test_invalid_specs_raise_usage_error(spec, words):
    with pytest.raises(mf.UsageError, match=words):
        av.make(spec)


@pytest.mark.parametrize(
    ("spec", "words"), [("dirichlet:labels=true", "labelled"), ("circles:by=labels", "labelled"), ("outages:groups=30", "lower groups")]
)
def test_patterns_that_do_not_fit_the_run_raise_usage_error(spec, words):
    with pytest.raises(mf.UsageError, match=words):
        av.schedule(spec, 5, 12)
