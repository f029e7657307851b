"""Which algorithm ends best, and whether the seeds decide it."""

import pytest

from mimicfl.report import summary
from mimicfl.report.export import results_latex
from mimicfl.report.tables import lines
from mimicfl.report.verdict import standing, tally, verdict
from mimicfl.significance import TIE, UNDECIDED, YES
from tests.report.test_report import ends, history

CLEAR = {"fedavg": [0.90, 0.91, 0.92, 0.90], "mimic": [0.70, 0.72, 0.71, 0.70], "mifa": [0.60, 0.61, 0.60, 0.62]}


def say(**values):
    return verdict(summary.group(ends(values)))


def marked(**values):
    return [line.mark for line in lines(summary.group(ends(values)))]


def test_algorithms_are_compared_within_each_setting():
    runs = []
    for rate, pairs in ((0.1, {"fedavg": 0.9, "mimic": 0.8}), (0.5, {"fedavg": 0.5, "mimic": 0.6})):
        for name, end in pairs.items():
            runs += [history([end + 0.01 * seed], name, seed=seed, lr=rate) for seed in (0, 1)]
    first, second = verdict(summary.group(runs)).splitlines()
    assert first.startswith("lr 0.1: FedAvg ends best at 90.5")
    assert "10.0 points above MimiC, ahead" in first
    assert second.startswith("lr 0.5: MimiC ends best at 60.5")
    tuned = [run for run in runs if run.config["algorithm"] == "mimic"]  # with one algorithm the settings are compared
    assert verdict(summary.group(tuned)).startswith("MimiC, lr 0.1 ends best at 80.5 ± 0.7 %, 20.0 points above MimiC, lr 0.5")


def test_first_is_significant_against_all_others():
    found = say(**CLEAR)
    assert found.startswith("FedAvg ends best at 90.8 ± 1.0 %, 20.0 points above MimiC, ahead in 4 of 4 seeds")
    assert "first" in found
    assert marked(**CLEAR) == ["★", "", ""]


def test_a_lead_in_all_of_two_seeds_is_undecided():
    values = {"fedavg": [0.80, 0.60], "mimic": [0.79, 0.58]}
    assert "undecided against MimiC" in say(**values)
    assert marked(**values) == ["○", ""]


def test_all_pairs_count_because_the_winner_is_named_afterwards():
    """p = 0.043 against the second: significant for one planned comparison, not for the best of three."""
    values = {"fedavg": [0.90, 0.92, 0.91, 0.93], "mimic": [0.89, 0.89, 0.90, 0.90]}
    alone = standing(summary.group(ends(values)), "test_accuracy")
    assert alone.outcomes == {"MimiC": YES}
    among = standing(summary.group(ends(values | {"mifa": [0.895, 0.89, 0.895, 0.905]})), "test_accuracy")
    assert among.outcomes == {"MimiC": UNDECIDED, "MIFA": UNDECIDED}


def test_a_tie_is_an_equivalence():
    values = {"fedavg": [0.900, 0.910, 0.920, 0.905], "mimic": [0.901, 0.909, 0.919, 0.905], "mifa": [0.6, 0.61, 0.6, 0.62]}
    assert marked(**values) == ["≈", "≈", ""]
    assert "significantly ahead of MIFA, tied with MimiC" in say(**values)
    groups = summary.group(ends(values))
    assert results_latex(groups).count("textbf") == 2


@pytest.mark.parametrize(("other", "found"), [(1.005, TIE), (1.3, UNDECIDED)])
def test_the_margin_of_a_loss_is_relative(other, found):
    values = {"fedavg": (1.0, 1.1, 1.2), "mimic": (other, 1.1, 1.2)}
    runs = [history([None], name, seed=seed) for name in values for seed in range(3)]
    for run, loss in zip(runs, (loss for each in values.values() for loss in each), strict=True):
        run.rows[-1]["test_loss"] = loss
    assert standing(summary.group(runs), "test_loss").outcomes == {"MimiC": found}


def test_over_the_seeds_that_all_share():
    found = say(fedavg=[0.70, 0.60, 0.95], mimic=[0.73, 0.62])
    assert found.startswith("MimiC ends best at 67.5 ± 7.8 %, 2.5 points above FedAvg over the 2 seeds that all share, ahead in 2 of 2")


def test_without_tests():
    assert "one seed" in say(fedavg=[0.9], mimic=[0.7])
    assert marked(fedavg=[0.9], mimic=[0.8]) == ["○", ""]
    assert marked(mimic=[0.5]) == [""]
    assert say(mimic=[0.5]) == "MimiC ends at 50.0 %."
    groups = summary.group([history([0.9], "fedavg", seed=0), history([0.8], "fedavg", seed=1), history([0.7], "mimic", seed=2)])
    assert "no seed in common" in verdict(groups)


def test_equal_results_tie_with_any_number_of_seeds():
    assert marked(fedavg=[0.9], fedprox=[0.9 + 1e-9], mimic=[0.8]) == ["≈", "≈", ""]
    assert say(fedavg=[0.9], fedprox=[0.9], mifa=[0.9 + 1e-9], mimic=[0.8]) == "FedAvg, FedProx and MIFA tie at 90.0 %."


def test_many_settings_are_counted():
    runs = [run for lr in (0.1, 0.2, 0.3) for run in ends(CLEAR, lr=lr)] + ends({name: each[:1] for name, each in CLEAR.items()}, lr=0.4)
    assert tally(summary.group(runs)) == "Of 4 settings, significantly first in: FedAvg 3. Best mean, or tied with it, in: FedAvg 4."
    undecided = [run for lr in (0.1, 0.2, 0.3, 0.4) for run in ends({name: each[:1] for name, each in CLEAR.items()}, lr=lr)]
    assert "first in: none" in tally(summary.group(undecided))
    assert tally(summary.group(runs[:12])) == ""


def test_many_groups_are_tested_against_the_best_only(monkeypatch):
    every = standing(summary.group(ends(CLEAR)), "test_accuracy").outcomes
    monkeypatch.setattr("mimicfl.report.verdict.MANY_GROUPS", 2)
    assert standing(summary.group(ends(CLEAR)), "test_accuracy").outcomes == every


def test_equal_means_of_different_results_are_no_tie():
    values = {"fedavg": [0.60, 0.90, 0.75], "mimic": [0.90, 0.60, 0.75]}
    assert standing(summary.group(ends(values)), "test_accuracy").outcomes == {"MimiC": UNDECIDED}
    assert marked(**values) == ["○", ""]
    assert "tie" not in say(**values)


def test_a_group_without_an_evaluation_changes_nothing_for_the_others():
    """Its runs may have diverged before the first evaluation: the others are still compared by accuracy, over the seeds they share."""
    runs = ends({"fedavg": [0.70, 0.60, 0.95], "mimic": [0.73, 0.62]})
    waiting = history([None, None], "mifa", seed=0)
    for row in waiting.rows:
        row["test_loss"] = None
    groups = summary.group([*runs, waiting])
    assert summary.main_metric(groups) == "test_accuracy"
    assert verdict(groups) == verdict(summary.group(runs))
    assert [line.seeds for line in lines(groups)] == [3, 2, 0]


def test_two_seeds_that_tie_with_one_and_decide_nothing_about_another():
    """Marked as with three seeds: the best is tied only if it ties with all others."""
    two = {"fedavg": [0.8, 0.7001], "mimic": [0.8001, 0.7], "mifa": [0.5, 0.69]}
    three = {"fedavg": [0.8, 0.7001, 0.6], "mimic": [0.8001, 0.7, 0.6], "mifa": [0.5, 0.69, 0.62]}
    assert marked(**two) == marked(**three) == ["○", "≈", ""]
