"""The page about the paper: its numbers and figures follow from the records."""

import itertools

import pytest

from mimicfl.errors import UsageError
from mimicfl.paper.reproduce import Cell
from mimicfl.paper.studies import STUDIES
from mimicfl.report.paper import write_paper_report
from mimicfl.report.paper_values import value
from tests.report.paper_records import P10, SEEDS, recorded

pytestmark = pytest.mark.slow


def test_value_of_a_cell():
    records = recorded(*P10, {"mimic": [70.0, 72.0, 74.0]}, shake=3.0)
    found = value(Cell(STUDIES[P10[0]], P10[1], "mimic"), records, SEEDS)
    assert found.mean == pytest.approx(72.0)
    assert found.std == pytest.approx(2.0)
    assert 2.0 < found.swing < 3.1
    assert value(Cell(STUDIES[P10[0]], P10[1], "mifa"), records, SEEDS) is None


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
