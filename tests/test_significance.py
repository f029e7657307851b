"""The tests of significance give the values of printed tables, of closed forms and of examples computed by hand."""

import itertools
import math

import numpy as np
import pytest

from mimicfl.significance import MOST_EXACT, Paired, chi2_tail, friedman, holm, nemenyi_quantile, sign_flips, t_cdf, t_quantile


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622), (19, 2.0930), (120, 1.9799)]
)  # printed tables of the t distribution, 97.5 %
def test_t_quantiles(degrees, quantile):
    assert t_quantile(0.975, degrees) == pytest.approx(quantile, abs=1e-4)
    assert t_cdf(-quantile, degrees) == pytest.approx(0.025, abs=1e-5)


@pytest.mark.parametrize("t", [-3.0, -0.5, 0.0, 0.2, 1.0, 7.0, 40.0])
def test_t_distribution_in_closed_form(t):
    assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
    assert t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


def test_paired_t_by_hand():
    found = Paired.between({0: 74.0, 1: 75.0, 2: 79.0, 9: 0.0}, {0: 73.0, 1: 73.0, 2: 76.0, 8: 1.0})
    assert (found.mean, found.pairs, found.ahead) == (2.0, 3, 3)
    assert found.error == pytest.approx(1 / math.sqrt(3))  # differences 1, 2, 3
    assert found.p == pytest.approx(2 * (0.5 - math.sqrt(12) / (2 * math.sqrt(14))))  # t = sqrt(12) with 2 degrees of freedom
    low, high = found.interval()
    assert (low, high) == (pytest.approx(2 - 4.30265 / math.sqrt(3), abs=1e-4), pytest.approx(2 + 4.30265 / math.sqrt(3), abs=1e-4))
    assert found.above(2.0) == found.below(2.0) == 0.5


def test_a_lead_of_one_standard_error_with_three_seeds_is_no_evidence():
    assert Paired(1.0, 1.0, 3, 2).p == pytest.approx(0.4226, abs=1e-4)


def test_too_few_pairs_decide_nothing():
    for few in (Paired.of([]), Paired.of([5.0])):
        assert few.p == few.equivalence(100.0) == 1.0
        assert few.interval() == (-math.inf, math.inf)


def test_equal_differences_are_as_sure_as_their_number():
    """Two seeds in which one more test sample is right are no significant lead; ten are."""
    few, many = Paired.of([0.1 + 0.2] * 3), Paired.of([-0.3] * 10)
    assert (few.error, few.p, few.equivalence(1.0), few.equivalence(0.1)) == (0.0, 0.25, 0.0, 1.0)
    assert many.p == sign_flips([-0.3] * 10) < 0.01
    assert Paired.of([0.0] * 3).p == 1.0


def test_equivalence_is_an_interval_inside_the_margin():
    """TOST at 0.05 rejects exactly if the 90 % interval lies within the margin."""
    for shift, scale in itertools.product((0.0, 0.4, -0.8), (0.1, 0.4, 1.0)):
        found = Paired.of([shift + scale * x for x in (-1.0, 0.3, 0.5, 0.2)])
        low, high = found.interval(0.1)
        assert (found.equivalence(1.0) < 0.05) == (low > -1 and high < 1)


def test_welch_by_hand():
    found = Paired.welch((10.0, 2.0, 4), (8.0, 2.0, 4))  # equal variances and sizes: the pooled test with 6 degrees of freedom
    assert found.degrees == pytest.approx(6)
    assert found.error == pytest.approx(math.sqrt(2))
    assert Paired.welch((10.0, 2.0, 3), (8.0, 0.0, 3)).degrees == pytest.approx(2)


def test_sign_flips_by_hand():
    assert sign_flips([1.0, 1.0, 1.0]) == 2 / 8
    assert sign_flips([3.0, 1.0, -2.0]) == 6 / 8  # |sum| 2: of the sums ±6, ±2, ±4, ±0, six are at least as large
    assert sign_flips([0.0, 0.0]) == 1.0
    for order in itertools.permutations([1, 2, 3, -4, 5]):  # rounding makes no equal sum smaller, in whatever order it is added
        assert sign_flips([d / 10 for d in order]) == sign_flips(order)


def test_sampled_sign_flips_agree_with_exact_ones():
    d = np.random.default_rng(1).normal(0.4, 1.0, MOST_EXACT)
    exact = sign_flips(d)
    sampled = sign_flips([*d, 0.0])  # a zero changes no sum, and one more difference than MOST_EXACT is sampled
    assert 0.001 < exact < 0.5
    assert sampled == pytest.approx(exact, abs=4 * math.sqrt(exact / 200_000))


def test_holm_by_hand():
    assert holm({"a": 0.04, "b": 0.01, "c": 0.02}) == pytest.approx({"a": 0.04, "b": 0.03, "c": 0.04})
    assert holm({"a": 0.9, "b": 0.5}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


@pytest.mark.parametrize(("algorithms", "printed"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (8, 3.031), (10, 3.164)])
def test_nemenyi_quantiles_as_printed(algorithms, printed):
    """Table 5 of Demšar (2006)."""
    assert nemenyi_quantile(algorithms) == pytest.approx(printed, abs=8e-4)


def test_chi_squared_tail():
    assert chi2_tail(5.991, 2) == pytest.approx(0.05, abs=1e-4)
    assert chi2_tail(9.488, 4) == pytest.approx(0.05, abs=1e-4)


def test_friedman_by_hand():
    """Ranks 1, 2, 3 in every one of four cells: the statistic is 12 * 4 / (3 * 4) * (1 + 0 + 1) = 8."""
    found = friedman({"worst": [1, 2, 3, 4], "best": [9, 8, 7, 6], "middle": [5, 5, 5, 5]})
    assert found.ranks == {"best": 1.0, "middle": 2.0, "worst": 3.0}
    assert found.p == pytest.approx(math.exp(-4))  # the tail of chi-squared with 2 degrees of freedom at 8
    assert found.critical == pytest.approx(2.343 * math.sqrt(0.5), abs=1e-3)
    assert found.groups() == [["best", "middle"], ["middle", "worst"]]


def test_friedman_with_ties():
    """Conover's correction: ranks (1.5, 1.5, 3) and (1, 2, 3): spread 1.5 + 2 = 3.5, means 1.25, 1.75, 3."""
    found = friedman({"a": [5, 9], "b": [5, 8], "c": [1, 7]})
    assert found.ranks == {"a": 1.25, "b": 1.75, "c": 3.0}
    assert found.p == pytest.approx(chi2_tail(4 * 2 * (0.75**2 + 0.25**2 + 1) / 3.5, 2))
    assert friedman({"a": [1, 1], "b": [1, 1]}).p == 1.0


def test_ranking_without_a_difference_is_one_group():
    found = friedman({"a": [1, 2], "b": [2, 1], "c": [1.5, 1.5]})
    assert found.groups() == [["a", "b", "c"]]


@pytest.mark.parametrize("scale", [1e-13, 1e-3, 1.0, 1e9])
def test_the_scale_of_the_differences_does_not_matter(scale):
    """Distances to an optimum may all be tiny."""
    differences = [1.0, -0.5, 2.0]
    small = [scale * d for d in differences]
    assert Paired.of(small).p == pytest.approx(Paired.of(differences).p)
    assert sign_flips(small) == sign_flips(differences)
