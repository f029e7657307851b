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
from mimicfl.report.paper_verdicts import FIRST, LESS, PRINTED, STEADY, Verdict, judge, value

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


def around(mean):
    """Three seeds with a standard deviation of 2."""
    return [mean - 2, mean, mean + 2]


PRINT = {"fedavg": 64.71, "fedprox": 66.91, "scaffold": 63.77, "mifa": 68.58, "mimic": 72.22}  # at P = 10 %, FedAvg ± 2.26


@pytest.mark.parametrize(
    ("off", "outcome", "words"),
    [
        ({}, YES, "5 of 5 cells within two standard errors"),
        ({"fedavg": 3.4}, YES, "at most by 3.4 (FedAvg, P = 10%); 10 cells are not run yet"),  # 2 sqrt((2^2 + 2.26^2) / 3) = 3.48
        ({"fedavg": -3.6}, TIE, "4 of 5 cells within two standard errors, in the median 6.5 points; they differ by 0.7 on average"),
        ({"fedavg": 20.0, "mimic": -20.0}, NO, "they differ by 8.0 on average, at most by 20.0"),
    ],
)
def test_the_numbers_in_print(off, outcome, words):
    found = verdict(recorded(*P10, {a: around(mean + off.get(a, 0)) for a, mean in PRINT.items()}), PRINTED, P10[0], "")
    assert found.outcome == outcome
    assert words in found.evidence


def test_the_numbers_in_print_without_a_spread():
    for off, outcome in ((3.2, YES), (3.4, NO)):  # ours for both: 2 sqrt(2 * 2^2 / 3) = 3.27
        found = verdict(recorded("table-3", "20", {"mimic": around(75.89 - off)}), PRINTED, "table-3", "")
        assert found.outcome == outcome
        assert "(no spread is printed; ours stands for both)" in found.evidence
    assert verdict(recorded("table-3", "20", {"mimic": [75.89]}), PRINTED, "table-3", "").outcome == FEW
    assert verdict({}, PRINTED, "table-3", "").outcome == OPEN
    assert (
        verdict(recorded("no-dropouts-fmnist", "nobody drops out", {"fedavg": around(70)}), PRINTED, "no-dropouts-fmnist", "").outcome == NO
    )


def test_first_means_ahead_of_everybody():
    """The best of the others may be anyone; and a lead over the best is not yet one over all: the next may be the less certain."""
    found = verdict(recorded(*P10, LOW | {"scaffold": [60, 61, 62], "mifa": [50, 51, 52], "mimic": [59, 60, 61]}), FIRST, P10[0], "P = 10%")
    assert (found.outcome, "against SCAFFOLD" in found.evidence) == (NO, True)
    unsure = recorded(*P10, LOW | {"mifa": [69, 70, 71], "scaffold": [60, 69, 80.9], "mimic": [70, 71, 72]})
    assert verdict(unsure, FIRST, P10[0], "P = 10%").outcome == TIE


def test_a_setting_counts_once_and_only_if_the_paper_has_it():
    found = {v.place: v.of_the_paper for v in judge({}, SEEDS) if v.claim == FIRST}
    assert found["Figure 7, Fashion-MNIST, p = 0.1"]
    assert found["Figure 6, Fashion-MNIST, p = 0.2"]
    assert not found["Figure 6, Fashion-MNIST, p = 0.1"]  # the same runs as Figure 7, which has all five algorithms
    assert not found["Figure 4, Fashion-MNIST, tau_max = 20"]  # in Table III
    assert not any(own for place, own in found.items() if place.startswith("What the paper leaves open"))


def test_who_loses_less():
    begin = {name: [70, 71, 72] for name in STUDIES["table-3"].algorithms}
    end = {"fedavg": [60, 61, 62], "fedprox": [50, 51, 52], "scaffold": [40, 41, 42], "mifa": [55, 57, 58], "mimic": [65, 66, 67]}

    def say(**ends):
        return verdict(recorded("table-3", "20", begin) | recorded("table-3", "100", end | ends), LESS, "table-3", "")

    assert (say().outcome, say().evidence) == (YES, "MIFA +5.7 ± 0.3 points better, MimiC +15.0 ± 0.0 points better")
    assert say(mifa=[45, 46, 47]).outcome == NO
    assert say(mifa=[40, 51, 62]).outcome == TIE
    assert say(mifa=[55]).outcome == FEW
    assert verdict(recorded("table-3", "20", begin), LESS, "table-3", "").outcome == OPEN


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
    assert verdict(apart, LESS, "table-3", "").outcome == OPEN
    bent = table(70, 60) | recorded("table-3", "50", {name: [75, 76, 77] for name in STUDIES["table-3"].algorithms})
    assert "against it FedAvg +5.0 from 20 to 50, FedProx" in verdict(bent, claim, "table-3", "").evidence


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
            "−3.7",  # the difference
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
    assert "://" not in page.replace("http://www.w3.org", "")  # one file, nothing from elsewhere


def test_pictures_of_columns_with_names(tmp_path):
    records = recorded("gaps", "random phases", {"fedavg": [60, 61, 62], "mimic": [74, 75, 76]})
    [section] = [s for s in build(records, SEEDS, tmp_path / "r.html", tmp_path / "r.md", tmp_path) if s.pictures]
    assert set(section.pictures) == {"gaps-random-phases", "gaps-beside"}
    heading = section.pictures["gaps-random-phases"].axes[0].get_title(loc="left")
    assert heading == "Table III, other readings of the gaps, Fashion-MNIST, random phases, mean ± std of 3 seeds"


def test_a_missing_seed_makes_nobody_better(tmp_path):
    """MimiC has the best mean, MIFA is ahead in the one seed that both have."""
    records = recorded("gaps", "random phases", {"mifa": [70], "mimic": [69, 75, 75]})
    [section] = [s for s in build(records, SEEDS, tmp_path / "r.html", tmp_path / "r.md", tmp_path) if s.pictures]
    best = {name: [e.best for e in entries] for name, entries in section.rows if any(e.ours != "–" for e in entries)}
    assert best == {"MIFA": [False, True, False], "MimiC": [False, False, False]}
    lines = section.pictures["gaps-random-phases"].axes[0].get_lines()
    assert [round(line.get_ydata()[-1]) for line in lines] == [70, 69]
    assert section.pictures["gaps-random-phases"].axes[0].get_title(loc="left").endswith("random phases, one seed")


def test_a_column_made_in_two_places_comes_again_in_both(tmp_path):
    records = recorded("rivals", "P = 10%", {"fedvarp": [70, 71, 72], "mimic": [70, 71, 72]})
    for run in records.values():
        if run.config["algorithm"] == "mimic":
            run.config["device"] = "cuda"
    document = tmp_path / "reproduce.md"
    build(records, SEEDS, tmp_path / "page.html", document, tmp_path)
    begin = "mimicfl reproduce rivals --columns 'P = 10%' --algorithms"
    assert f"{begin} fedvarp --seeds 3 --again" in document.read_text()
    assert f"{begin} mimic --seeds 3 --device cuda --again" in document.read_text()


def test_the_page_says_which_numbers_come_again(tmp_path):
    records = recorded(*P10, {"mimic": [74, 75, 76], "mifa": [70, 71, 72]})
    for version, engine, expected in (
        ("0.1.0", "batched:160:compiled", "Not so yet for 6 of the 6 records"),
        ("0.1.0", "native", None),
        ("0.2.0, then 0.3.0", "native", "Not so yet for 6 of the 6 records"),
        ("0.2.0", "batched:160:compiled", None),
    ):
        for run in records.values():
            run.environment |= {"mimicfl": version, "engine": engine}
        build(records, SEEDS, tmp_path / "report.html", tmp_path / "reproduce.md", tmp_path / "pictures")
        for text in (file.read_text() for file in (tmp_path / "report.html", tmp_path / "reproduce.md")):
            assert "every round of it should be the same" in text
            assert expected in text if expected else "Not so yet" not in text


def test_no_records_no_page(tmp_path):
    with pytest.raises(UsageError, match="no record yet"):
        build({}, SEEDS, tmp_path / "a.html", tmp_path / "a.md", tmp_path)
