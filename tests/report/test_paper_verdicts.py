"""Verdicts on the paper's claims follow from the records."""

import pytest

from mimicfl.paper.studies import STUDIES
from mimicfl.report.paper import summary
from mimicfl.report.paper_values import lookup_in
from mimicfl.report.paper_verdicts import FIRST, FIRST_ROUNDS, LESS, PRINTED, STEADY, Verdict, judge
from mimicfl.significance import FEW, NO, OPEN, TIE, UNDECIDED, YES
from tests.report.paper_records import P10, SEEDS, recorded, verdict

pytestmark = pytest.mark.slow
LOW = {name: [30, 31, 32] for name in ("fedavg", "fedprox", "scaffold")}


@pytest.mark.parametrize(
    ("mimic", "mifa", "outcome", "words"),
    [
        ([74, 75, 76], [69, 70, 71], YES, "+5.0 [+5.0, +5.0] points against MIFA, the best of the others, ahead in 3 of 3 seeds"),
        ([74, 75, 76], [69, 75, 80], UNDECIDED, "+0.3 [−10.9, +11.5] points"),
        ([70, 75, 80], [69, 73, 78.5], YES, "+1.5 [+0.3, +2.7] points"),  # seeds differ by far more than the algorithms do
        ([70, 75, 80], [69, 72.6, 78.5], UNDECIDED, "+1.6 [−0.1, +3.4] points"),  # ahead in every seed, but p = 0.06
        ([69, 70, 71], [74, 75, 76.1], NO, "−5.0 [−5.2, −4.9] points"),
        ([70, 71, 72], [70.1, 71, 71.9], TIE, "+0.0 [−0.2, +0.2] points"),
        ([70, 71, 72], [71.5, 71, 70.5], UNDECIDED, "+0.0 [−3.7, +3.7] points"),  # no lead, but nothing shows that they are equal
        ([80, 81], [79, 80, 90], YES, "+1.0 [+1.0, +1.0] points against MIFA, the best of the others, ahead in 2 of 2 seeds"),
        ([75], [70], FEW, "+5.0 points against MIFA, the best of the others, ahead in 1 of 1 seed;"),  # no standard error
    ],
)
def test_first_needs_significance_and_a_tie_equivalence(mimic, mifa, outcome, words):
    found = verdict(recorded(*P10, {**LOW, "mifa": mifa, "mimic": mimic}), FIRST, P10[0], "P = 10%")
    assert found.outcome == outcome
    assert words in found.evidence
    assert "the paper: +3.6 against MIFA" in found.evidence


def test_p_values_are_adjusted_for_all_comparisons_of_a_table():
    """p = 0.009 in one column: significant among the four comparisons of one column, not among twelve."""
    ends = {**LOW, "mifa": [70, 71, 72], "mimic": [72, 73.4, 74.8]}
    alone = recorded(*P10, ends)
    level = {name: [30, 40, 20] for name in LOW} | {"mifa": [20, 30, 40], "mimic": [30, 30, 30]}
    table = alone | recorded(P10[0], "30%", level) | recorded(P10[0], "50%", level)
    assert verdict(alone, FIRST, P10[0], "P = 10%").outcome == YES
    assert verdict(table, FIRST, P10[0], "P = 10%").outcome == UNDECIDED


def test_first_uses_the_last_tenth_and_not_the_last_round():
    """MimiC's last round is the worst of the run, its last tenth is the best."""
    records = recorded(*P10, {**LOW, "mifa": [60, 61, 62], "mimic": [70, 71, 72]})
    for run in records.values():
        if run.config["algorithm"] == "mimic":
            run.rows[-1]["test_accuracy"] -= 0.15
    assert verdict(records, FIRST, P10[0], "P = 10%").evidence.startswith("+2.5")  # (70 + 55) / 2 - 60


def test_at_equal_rounds_the_others_stop_where_scaffold_stops():
    """The others overtake SCAFFOLD only in rounds that SCAFFOLD does not have."""
    records = recorded(*P10, {**LOW, "mifa": [50, 51, 52], "mimic": [80, 81, 82]})
    for run in records.values():
        if run.config["algorithm"].startswith("scaffold"):
            del run.rows[10:]
            for row in run.rows:
                row["test_accuracy"] += 0.4
        else:
            for row in run.rows[:10]:
                row["test_accuracy"] -= 0.2
    at_uploads, at_rounds = (verdict(records, claim, P10[0], "P = 10%") for claim in (FIRST, FIRST_ROUNDS))
    assert (at_uploads.outcome, at_rounds.outcome) == (YES, NO)
    assert at_rounds.evidence.startswith("−10.0")
    assert "over 10 rounds" in at_rounds.evidence


def test_first_is_open_until_all_algorithms_have_runs():
    few = {name: ends for name, ends in LOW.items() if name != "scaffold"}
    assert verdict(recorded(*P10, {**few, "mifa": [50, 51, 52], "mimic": [70, 71, 72]}), FIRST, P10[0], "P = 10%").outcome == OPEN


def test_first_is_open_without_shared_seeds():
    ends = {**LOW, "mifa": [90, 90, 90], "mimic": [70, 71]}
    records = recorded(*P10, ends)
    cell = STUDIES[P10[0]]
    for seed in (0, 1):  # MIFA, far ahead, keeps only a seed that MimiC lacks
        del records[cell.experiment(P10[1], "mifa", seed).id]
    assert verdict(records, FIRST, P10[0], "P = 10%").outcome == OPEN


def test_stable_only_if_both_oscillate_less_than_all_others():
    place = ("figure-7", "0.1")
    ends = {name: [60.0, 61.0, 62.0] for name in ("fedavg", "fedprox", "scaffold", "mifa", "mimic")}
    calm = {"fedavg": 5.0, "fedprox": 5.0, "scaffold": 6.0, "mifa": 1.0, "mimic": 2.0}
    assert verdict(recorded(*place, ends, calm), STEADY, "figure-7", "p = 0.1").outcome == YES
    assert verdict(recorded(*place, ends, calm | {"mimic": 5.5}), STEADY, "figure-7", "p = 0.1").outcome == NO
    assert verdict(recorded(*place, ends, calm | {"mimic": 5.0}), STEADY, "figure-7", "p = 0.1").outcome == UNDECIDED
    del ends["fedprox"]
    assert verdict(recorded(*place, ends, calm), STEADY, "figure-7", "p = 0.1").outcome == OPEN


def test_published_numbers_confirm_the_claims():
    """With three seeds at exactly the published values every claim about a table must hold."""
    records = {}
    for study in STUDIES.values():
        for column in study.columns if study.published and study.claimed else ():
            records |= recorded(study.name, column, {a: [row[column][0]] * 3 for a, row in study.published.items()})
    found = {(v.claim, v.place): v for v in judge(lookup_in(records, SEEDS)) if v.outcome != OPEN and v.claim not in (STEADY, PRINTED)}
    assert len(found) > 15
    assert {key: v.evidence for key, v in found.items() if v.outcome != YES} == {}


PRINT = {"fedavg": 71.31, "fedprox": 72.91, "scaffold": 71.88, "mifa": 73.24, "mimic": 74.24}  # P = 50 %: ± 1.09, 1.00, 0.25, 0.41, 1.31


def around(mean, spread=0.1):
    """Three seeds with this standard deviation."""
    return [mean - spread, mean, mean + spread]


@pytest.mark.parametrize(
    ("off", "outcome", "words"),
    [
        ({"mifa": 0.3, "scaffold": -0.2}, UNDECIDED, "of 5 cells, 4 agree within 2 points, 0 differ, 1 are undecided"),
        ({"fedavg": 20.0, "mimic": -30.0}, NO, "2 differ, 0 are undecided; the mean difference is 10.0, the largest 30.0 (MimiC, P = 50%)"),
    ],
)
def test_agreement_with_published_numbers(off, outcome, words):
    place = (P10[0], "50%")
    found = verdict(recorded(*place, {a: around(mean + off.get(a, 0)) for a, mean in PRINT.items()}), PRINTED, P10[0], "")
    assert found.outcome == outcome
    assert words in found.evidence
    assert "10 cells have not been run" in found.evidence


def test_agreement_with_published_numbers_without_spread():
    place = ("no-dropouts-fmnist", "nobody drops out")
    for mean, spread, outcome in ((76.8, 0.1, YES), (76.8, 3.0, UNDECIDED), (74.9, 0.1, NO)):
        found = verdict(recorded(*place, {"fedavg": around(mean, spread)}), PRINTED, place[0], "")
        assert found.outcome == outcome
        assert "no spread" in found.evidence
    assert verdict(recorded("table-3", "20", {"mimic": [75.89]}), PRINTED, "table-3", "").outcome == FEW
    assert verdict({}, PRINTED, "table-3", "").outcome == OPEN


def test_first_requires_a_lead_over_every_other_algorithm():
    """Any algorithm can be the best of the others. A clear lead over the best is not enough if the lead over another is uncertain."""
    found = verdict(recorded(*P10, LOW | {"scaffold": [60, 61, 62], "mifa": [50, 51, 52], "mimic": [59, 60, 61]}), FIRST, P10[0], "P = 10%")
    assert (found.outcome, "against SCAFFOLD" in found.evidence) == (NO, True)
    unsure = recorded(*P10, LOW | {"mifa": [69, 70, 71], "scaffold": [60, 69, 80.9], "mimic": [70, 71, 72]})
    assert verdict(unsure, FIRST, P10[0], "P = 10%").outcome == UNDECIDED


def test_each_setting_of_the_paper_counts_once():
    found = {v.place: v.of_the_paper for v in judge(lookup_in({}, SEEDS)) if v.claim == FIRST}
    assert found["Figure 7, Fashion-MNIST, p = 0.1"]
    assert found["Figure 6, Fashion-MNIST, p = 0.2"]
    assert not found["Figure 6, Fashion-MNIST, p = 0.1"]  # the same runs as Figure 7, which has all five algorithms
    assert not found["Figure 4, Fashion-MNIST, tau_max = 20"]  # in Table III
    assert not any(own for place, own in found.items() if place.startswith("What the paper leaves open"))


def test_verdict_on_smaller_loss_of_accuracy():
    begin = {name: [70, 71, 72] for name in STUDIES["table-3"].algorithms}
    end = {"fedavg": [60, 61, 62], "fedprox": [50, 51, 52], "scaffold": [40, 41, 42], "mifa": [55, 57, 58], "mimic": [65, 66, 67]}

    def say(**ends):
        return verdict(recorded("table-3", "20", begin) | recorded("table-3", "100", end | ends), LESS, "table-3", "")

    assert (say().outcome, say().evidence) == (YES, "MIFA +5.7 [+4.2, +7.1] points better, MimiC +15.0 [+15.0, +15.0] points better")
    assert say(mifa=[45, 46, 47]).outcome == NO
    assert say(mifa=[40, 51, 62]).outcome == UNDECIDED
    assert say(mifa=[55]).outcome == FEW
    assert verdict(recorded("table-3", "20", begin), LESS, "table-3", "").outcome == OPEN


def test_verdicts_on_trends():
    def table(first, last):
        names = STUDIES["table-3"].algorithms
        few, many = ({name: [end, end + 1, end + 2] for name in names} for end in (first, last))
        return recorded("table-3", "20", few) | recorded("table-3", "100", many)

    claim = "Accuracy falls as tau_max grows"
    assert verdict(table(70, 60), claim, "table-3", "").outcome == YES
    assert verdict(table(60, 70), claim, "table-3", "").outcome == NO
    assert verdict(table(70, 70), claim, "table-3", "").outcome == UNDECIDED
    one = recorded("table-3", "20", {name: [70] for name in STUDIES["table-3"].algorithms})
    one |= recorded("table-3", "100", {name: [60] for name in STUDIES["table-3"].algorithms})
    assert verdict(one, claim, "table-3", "").outcome == FEW  # one seed gives no standard error
    assert verdict(recorded("table-3", "20", {"mimic": [1, 2, 3]}), claim, "table-3", "").outcome == OPEN
    apart = {k: v for k, v in table(60, 70).items() if int(v.config["seed"]) == (0 if "bounded:20" in v.config["availability"] else 1)}
    assert verdict(apart, claim, "table-3", "").outcome == OPEN  # no seed is in both columns
    assert verdict(apart, LESS, "table-3", "").outcome == OPEN
    bent = table(70, 60) | recorded("table-3", "50", {name: [75, 76, 77] for name in STUDIES["table-3"].algorithms})
    assert "opposite direction: FedAvg +5.0 from 20 to 50, FedProx" in verdict(bent, claim, "table-3", "").evidence


def test_summary_counts():
    verdicts = [Verdict(FIRST, "", outcome, "", "table-3") for outcome in (YES, YES, TIE, NO, UNDECIDED, FEW, OPEN)]
    assert "At the paper's number of uploads: MimiC is first in 2 of 5 settings, tied in 1, behind in 1, undecided in 1." in summary(
        verdicts
    )
    assert "2 of 7 claims need more runs" in summary(verdicts)
