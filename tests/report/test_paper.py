"""The page about the paper says what the records say, and nothing else."""

import itertools

import pytest
import torch

from mimicfl.errors import UsageError
from mimicfl.metrics.history import History
from mimicfl.paper.reproduce import Cell
from mimicfl.paper.studies import STUDIES
from mimicfl.report.gap import FEW, NO, OPEN, TIE, YES
from mimicfl.report.paper import build, summary
from mimicfl.report.paper_verdicts import FIRST, PRINTED, STEADY, Verdict, judge, value

SEEDS = [0, 1, 2]


def recorded(study, column, finals, shake=0.0):
    """Records of runs that end at these accuracies, with curves that go up and down by `shake` before."""
    found = {}
    for algorithm, ends in finals.items():
        for seed, end in enumerate(ends):
            e = STUDIES[study].experiment(column, algorithm, seed)
            swing = shake.get(algorithm, 0.0) if isinstance(shake, dict) else shake
            curve = [end + swing * (-1) ** t for t in range(19)] + [end]
            rows = [
                {"round": t, "active": 3, "uploads": t + 1, "bytes_up": t, "train_loss": 1.0, "test_loss": 1.0, "test_accuracy": a / 100}
                for t, a in enumerate(curve)
            ]
            found[e.id] = History(rows, torch.empty(0), 30, config=e.to_dict(), environment={"gpu": None, "processor": "some CPU"})
    return found


def verdict(records, claim, study, setting):
    return next(v for v in judge(records, SEEDS) if (v.claim, v.study, v.setting) == (claim, study, setting))


P10 = ("table-4-fmnist", "10%")


def test_value_of_a_cell():
    records = recorded(*P10, {"mimic": [70.0, 72.0, 74.0]}, shake=3.0)
    found = value(Cell(STUDIES[P10[0]], P10[1], "mimic"), records, SEEDS)
    assert found.mean == pytest.approx(72.0)
    assert found.std == pytest.approx(2.0)
    assert 2.0 < found.swing < 3.1
    assert value(Cell(STUDIES[P10[0]], P10[1], "mifa"), records, SEEDS) is None


LOW = {name: [30, 31, 32] for name in ("fedavg", "fedprox", "scaffold")}


@pytest.mark.parametrize(
    ("mimic", "mifa", "outcome", "words"),
    [
        ([74, 75, 76], [69, 70, 71], YES, "+5.0 ± 0.0 points against MIFA, the best of the others, ahead in 3 of 3 seeds"),
        ([74, 75, 76], [69, 75, 80], TIE, "+0.3 ± 2.6 points"),
        ([60, 70, 80], [59, 68.5, 79], YES, "+1.2 ± 0.2 points"),  # seeds differ by far more than the algorithms do
        ([69, 70, 71], [74, 75, 77], NO, "−5.3 ± 0.3 points"),
        ([80, 60], [79, 59, 90], YES, "+1.0 ± 0.0 points against MIFA, the best of the others, ahead in 2 of 2 seeds"),
        ([75], [70], FEW, "+5.0 points against MIFA, the best of the others, ahead in 1 of 1 seed;"),  # which says nothing of chance
    ],
)
def test_first_only_beyond_one_standard_error(mimic, mifa, outcome, words):
    found = verdict(recorded(*P10, {**LOW, "mifa": mifa, "mimic": mimic}), FIRST, P10[0], "P = 10%")
    assert found.outcome == outcome
    assert words in found.evidence
    assert "the paper: +3.6 against MIFA" in found.evidence


def test_nobody_is_first_before_all_are_there():
    few = {name: ends for name, ends in LOW.items() if name != "scaffold"}
    assert verdict(recorded(*P10, {**few, "mifa": [50, 51, 52], "mimic": [70, 71, 72]}), FIRST, P10[0], "P = 10%").outcome == OPEN


def test_nobody_is_judged_by_seeds_that_others_lack():
    ends = {**LOW, "mifa": [90, 90, 90], "mimic": [70, 71]}
    records = recorded(*P10, ends)
    cell = STUDIES[P10[0]]
    for seed in (0, 1):  # MIFA, far ahead, is left with a seed that MimiC has not
        del records[cell.experiment(P10[1], "mifa", seed).id]
    assert verdict(records, FIRST, P10[0], "P = 10%").outcome == OPEN


def test_steady_only_if_both_shake_less_than_all_others():
    place = ("figure-7", "0.1")
    ends = {name: [60.0, 61.0, 62.0] for name in ("fedavg", "fedprox", "scaffold", "mifa", "mimic")}
    calm = {"fedavg": 5.0, "fedprox": 5.0, "scaffold": 6.0, "mifa": 1.0, "mimic": 2.0}
    assert verdict(recorded(*place, ends, calm), STEADY, "figure-7", "p = 0.1").outcome == YES
    assert verdict(recorded(*place, ends, calm | {"mimic": 5.5}), STEADY, "figure-7", "p = 0.1").outcome == NO
    assert verdict(recorded(*place, ends, calm | {"mimic": 5.0}), STEADY, "figure-7", "p = 0.1").outcome == TIE
    del ends["fedprox"]
    assert verdict(recorded(*place, ends, calm), STEADY, "figure-7", "p = 0.1").outcome == OPEN


def test_the_papers_own_numbers_bear_its_claims_out():
    """Three seeds at exactly what is printed: whatever is claimed of a table must then hold."""
    records = {}
    for study in STUDIES.values():
        for column in study.columns if study.published and study.claimed else ():
            records |= recorded(study.name, column, {a: [row[column][0]] * 3 for a, row in study.published.items()})
    found = {(v.claim, v.place): v for v in judge(records, SEEDS) if v.outcome != OPEN and v.claim != STEADY}  # curves are not in print
    assert len(found) > 15
    assert {key: v.evidence for key, v in found.items() if v.outcome != YES} == {}


def test_the_numbers_in_print():
    """P = 10 %: 64.71 ± 2.26, 66.91 ± 7.24, 63.77 ± 4.66, 68.58 ± 6.45 and 72.22 ± 5.28 of three trials."""
    near = {"fedavg": [63, 65, 67], "fedprox": [60, 65, 70], "scaffold": [62, 65, 68], "mifa": [70, 71, 72], "mimic": [70, 73, 76]}
    found = verdict(recorded(*P10, near), PRINTED, P10[0], "")
    assert (found.outcome, found.evidence) == (
        YES,
        "5 of 5 within two standard errors; by +0.6 points on average, by +2.4 for MIFA at P = 10%",
    )
    far = verdict(recorded(*P10, near | {"fedavg": [50, 51, 52]}), PRINTED, P10[0], "")
    assert far.outcome == TIE  # one of five is nothing unusual
    assert far.evidence.startswith("4 of 5 within two standard errors; by −2.2 points on average, by −13.7 for FedAvg")
    assert verdict(recorded(*P10, near | LOW), PRINTED, P10[0], "").outcome == NO  # three of five are
    assert verdict(recorded(*P10, {"mimic": [72]}), PRINTED, P10[0], "").outcome == FEW
    assert verdict(recorded(*P10, {"mimic": [72, 73]}), PRINTED, "table-3", "").outcome == OPEN
    bare = verdict(recorded("table-3", "20", {"mimic": [75, 76, 77]}), PRINTED, "table-3", "")
    assert "(the paper prints none: ours for both)" in bare.evidence


def test_trends_over_the_columns():
    def table(first, last):
        names = STUDIES["table-3"].algorithms
        few, many = ({name: [end, end + 1, end + 2] for name in names} for end in (first, last))
        return recorded("table-3", "20", few) | recorded("table-3", "100", many)

    claim = "Accuracy falls as tau_max grows"
    assert verdict(table(70, 60), claim, "table-3", "").outcome == YES
    assert verdict(table(60, 70), claim, "table-3", "").outcome == NO
    assert verdict(table(70, 70), claim, "table-3", "").outcome == TIE
    one = recorded("table-3", "20", {name: [70] for name in STUDIES["table-3"].algorithms})
    one |= recorded("table-3", "100", {name: [60] for name in STUDIES["table-3"].algorithms})
    assert verdict(one, claim, "table-3", "").outcome == FEW  # one seed says nothing of chance
    assert verdict(recorded("table-3", "20", {"mimic": [1, 2, 3]}), claim, "table-3", "").outcome == OPEN
    apart = {k: v for k, v in table(60, 70).items() if int(v.config["seed"]) == (0 if "bounded:20" in v.config["availability"] else 1)}
    assert verdict(apart, claim, "table-3", "").outcome == OPEN  # no seed is in both columns
    assert next(v for v in judge(apart, SEEDS) if v.claim.startswith("From tau_max")).outcome == OPEN


def test_the_reference_without_dropouts():
    claim, column = "FedAvg without dropouts reaches 76.82 %", "nobody drops out"
    for ends, outcome in (([78, 78.5, 79], YES), ([76, 76.5, 77.5], TIE), ([70, 70.5, 71], NO)):
        found = verdict(recorded("no-dropouts-fmnist", column, {"fedavg": ends}), claim, "no-dropouts-fmnist", "")
        assert found.outcome == outcome


def test_summary_counts():
    verdicts = [Verdict(FIRST, "", outcome, "", "table-3") for outcome in (YES, YES, TIE, NO, FEW, OPEN)]
    assert summary(verdicts) == (
        "MimiC is first beyond one standard error in 2 of 4 settings, within it in 1, behind in 1. 2 of 6 claims wait for runs."
    )


def test_page_and_document(tmp_path):
    records = recorded(*P10, {"fedavg": [60, 61, 62], "scaffold": [50, 51, 52], "mifa": [69, 70, 71], "mimic": [74, 75]})
    sections = build(records, SEEDS, tmp_path / "report.html", tmp_path / "docs" / "reproduce.md", tmp_path / "docs" / "pictures")
    page, document = (tmp_path / "report.html").read_text(), (tmp_path / "docs" / "reproduce.md").read_text()
    for text, word in itertools.product(
        (page, document),
        [
            "61.00 ± 1.00",  # ours
            "64.71 ± 2.26",  # published
            "-3.7",  # the difference
            "74.50 ± 0.71 (2 of 3 seeds)",
            "mimicfl reproduce table-4-fmnist --columns 10% --seeds 3 --again",
            "11 of 45 runs recorded, on some CPU",
            "How far the rate falls",
        ],
    ):
        assert word in text
    assert "![Table IV, Fashion-MNIST](pictures/paper-table-4-fmnist-10.png)" in document
    assert (tmp_path / "docs" / "pictures" / "paper-table-4-fmnist-10.png").stat().st_size > 10_000
    assert [section.study.name for section in sections] == list(STUDIES)
    assert "http" not in page.replace("http://www.w3.org", "")  # one file, nothing from elsewhere


def test_no_records_no_page(tmp_path):
    with pytest.raises(UsageError, match="no record yet"):
        build({}, SEEDS, tmp_path / "a.html", tmp_path / "a.md", tmp_path)
