"""The page about the paper: its verdicts, numbers and figures follow from the records."""

import itertools
from zlib import crc32

import pytest
import torch

from mimicfl.errors import UsageError
from mimicfl.metrics.history import History
from mimicfl.paper.reproduce import Cell
from mimicfl.paper.studies import STUDIES
from mimicfl.report.paper import summary, write_paper_report
from mimicfl.report.paper_values import lookup_in, value
from mimicfl.report.paper_verdicts import FIRST, FIRST_ROUNDS, LESS, PRINTED, STEADY, Verdict, judge
from mimicfl.significance import FEW, NO, OPEN, TIE, UNDECIDED, YES

pytestmark = pytest.mark.slow

SEEDS = [0, 1, 2]


def recorded(study, column, finals, shake=0.0):
    """Records of runs that end at these accuracies, with curves that oscillate by `shake` before.

    A noise too small to be shown keeps differences from being equal in all seeds, which would prove nothing.
    """
    found = {}
    for algorithm, ends in finals.items():
        for seed, exact in enumerate(ends):
            noise = 1e-8 * (1 + crc32(f"{study} {column} {algorithm}".encode()) % 97) * (seed % 3 - 1)
            end = exact + noise
            e = STUDIES[study].experiment(column, algorithm, seed)
            swing = (shake.get(algorithm, 0.0) if isinstance(shake, dict) else shake) + noise / 2
            curve = [end + swing * (-1) ** t for t in range(19)] + [end]
            rows = [
                {"round": t, "active": 3, "uploads": t + 1, "bytes_up": t, "train_loss": 1.0, "test_loss": 1.0, "test_accuracy": a / 100}
                for t, a in enumerate(curve)
            ]
            found[e.id] = History(rows, torch.empty(0), 30, config=e.to_dict(), environment={"gpu": None, "processor": "some CPU"})
    return found


def verdict(records, claim, study, setting):
    return next(v for v in judge(lookup_in(records, SEEDS)) if (v.claim, v.study, v.setting) == (claim, study, setting))


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


def test_page_and_document(tmp_path):
    records = recorded(*P10, {"fedavg": [60, 61, 62], "scaffold": [50, 51, 52], "mifa": [69, 70, 71], "mimic": [74, 75]})
    sections = write_paper_report(
        records, SEEDS, tmp_path / "report.html", tmp_path / "docs" / "reproduce.md", tmp_path / "docs" / "pictures"
    )
    page, document = (tmp_path / "report.html").read_text(), (tmp_path / "docs" / "reproduce.md").read_text()
    for text, word in itertools.product(
        (page, document),
        [
            "61.00 ± 1.00",  # ours
            "64.71 ± 2.26",  # published
            "−3.7",  # the difference
            "74.50 ± 0.71 (2 of 3 seeds)",
            "mimicfl reproduce table-4-fmnist --columns 10% --seeds 3 --again",
            "11 of 45 runs recorded, made on some CPU",
            "Floor of the rate",
        ],
    ):
        assert word in text
    assert "![Table IV, Fashion-MNIST](pictures/paper-table-4-fmnist-10.png)" in document
    assert (tmp_path / "docs" / "pictures" / "paper-table-4-fmnist-10.png").stat().st_size > 10_000
    assert [section.study.name for section in sections] == list(STUDIES)
    assert "://" not in page.replace("http://www.w3.org", "")  # a single file without external resources


def test_figure_names_of_columns_with_text_labels(tmp_path):
    records = recorded("gaps", "random phases", {"fedavg": [60, 61, 62], "mimic": [74, 75, 76]})
    [section] = [s for s in write_paper_report(records, SEEDS, tmp_path / "r.html", tmp_path / "r.md", tmp_path) if s.figures]
    assert set(section.figures) == {"gaps-random-phases", "gaps-beside"}
    heading = section.figures["gaps-random-phases"].axes[0].get_title(loc="left")
    assert heading == "Table III, other readings of the gaps, Fashion-MNIST, random phases, mean ± std of 3 seeds"


def test_best_is_decided_over_shared_seeds(tmp_path):
    """MimiC has the best mean, but MIFA is ahead in the one seed that both have."""
    records = recorded("gaps", "random phases", {"mifa": [70], "mimic": [69, 75, 75]})
    [section] = [s for s in write_paper_report(records, SEEDS, tmp_path / "r.html", tmp_path / "r.md", tmp_path) if s.figures]
    best = {name: [e.best for e in entries] for name, entries in section.rows if any(e.ours != "–" for e in entries)}
    assert best == {"MIFA": [False, True, False], "MimiC": [False, False, False]}
    lines = section.figures["gaps-random-phases"].axes[0].get_lines()
    assert [round(line.get_ydata()[-1]) for line in lines] == [70, 69]
    assert section.figures["gaps-random-phases"].axes[0].get_title(loc="left").endswith("random phases, one seed")


def test_commands_repeat_a_column_on_each_device_it_was_made_on(tmp_path):
    records = recorded("rivals", "P = 10%", {"fedvarp": [70, 71, 72], "mimic": [70, 71, 72]})
    for run in records.values():
        if run.config["algorithm"] == "mimic":
            run.config["device"] = "cuda"
    document = tmp_path / "reproduce.md"
    write_paper_report(records, SEEDS, tmp_path / "page.html", document, tmp_path)
    begin = "mimicfl reproduce rivals --columns 'P = 10%' --algorithms"
    assert f"{begin} fedvarp --seeds 3 --again" in document.read_text()
    assert f"{begin} mimic --seeds 3 --device cuda --again" in document.read_text()


def test_page_says_which_records_repeat_exactly(tmp_path):
    records = recorded(*P10, {"mimic": [74, 75, 76], "mifa": [70, 71, 72]})
    for version, engine, expected in (
        ("0.1.0", "batched:160:compiled", "does not hold for 6 of the 6 records"),
        ("0.1.0", "native", None),
        ("0.2.0, then 0.3.0", "native", "does not hold for 6 of the 6 records"),
        ("0.2.0", "batched:160:compiled", None),
    ):
        for run in records.values():
            run.environment |= {"mimicfl": version, "engine": engine}
        write_paper_report(records, SEEDS, tmp_path / "report.html", tmp_path / "reproduce.md", tmp_path / "pictures")
        for text in (file.read_text() for file in (tmp_path / "report.html", tmp_path / "reproduce.md")):
            assert "every round should" in text
            assert expected in text if expected else "does not hold" not in text


def test_page_without_records_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no record yet"):
        write_paper_report({}, SEEDS, tmp_path / "a.html", tmp_path / "a.md", tmp_path)
