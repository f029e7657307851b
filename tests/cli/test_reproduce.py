"""`mimicfl reproduce` and `mimicfl report --paper`."""

from pathlib import Path

import pytest

from tests.cli.conftest import call
from tests.paper.conftest import tiny  # noqa: F401


def test_list(capsys):
    assert call("reproduce", "--list") == 0
    out = capsys.readouterr().out
    assert "table-4-fmnist" in out
    assert "figure-8" in out


@pytest.mark.slow
def test_run_status_page_and_again(tiny, capsys):  # noqa: F811
    assert call("reproduce", "tiny", "--seeds", "2") == 0
    out = capsys.readouterr().out
    assert "12 runs, 0 of them already in records/paper; 12 to train" in out
    assert "50.00 ± 1.50" in out  # published beside ours
    assert call("reproduce", "tiny", "--seeds", "2") == 0
    assert "12 of them already in records/paper; 0 to train" in capsys.readouterr().out
    assert call("reproduce", "tiny", "--status") == 0
    out = capsys.readouterr().out
    assert "6 of 9" in out
    assert "FedAvg 1, SCAFFOLD 1, MimiC 1" in out
    assert "take about 1 minute on an H200" in out
    assert call("reproduce", "tiny", "--columns", "10%", "--algorithms", "mimic", "--seeds", "2", "--again") == 0
    assert "2 of 2 runs are identical in every round" in capsys.readouterr().out
    assert call("reproduce", "tiny", "--columns", "10%", "--algorithms", "mimic", "--seeds", "2", "--again") == 0
    assert "2 of them were already in runs/paper-again" in capsys.readouterr().out
    assert call("reproduce", "tiny", "--seeds", "2", "--again", "--out", "runs/paper") == 2
    assert "recorded runs" in capsys.readouterr().err
    assert call("report", "--paper") == 0
    assert "Table 0, digits" in Path("docs/reproduce.md").read_text()
    assert "Table 0, digits" in Path("runs/paper/report.html").read_text()


@pytest.mark.slow
def test_a_quick_look_is_marked_and_not_recorded(tiny, capsys):  # noqa: F811
    assert call("reproduce", "tiny", "--scale", "0.5", "--seeds", "1") == 0
    out = capsys.readouterr().out
    assert "scale 0.5: a quick look, not the paper's setting" in out
    assert not Path("records").exists()


def test_mistakes(tiny, capsys):  # noqa: F811
    for words, said in [
        ([], "name an experiment"),
        (["tabel-3"], "there is no experiment 'tabel-3'"),
        (["tiny", "--columns", "20%"], "there is no column '20%'"),
        (["tiny", "--scale", "0"], "--scale"),
        (["tiny", "--seeds", "x"], "seeds takes a count"),
        (["tiny", "--again"], "nothing to compare with"),
        (["tiny", "--minutes", "-1"], "--minutes"),
        (["all", "tabel-3"], "there is no experiment 'tabel-3'"),
        (["tiny", "--status", "--columns", "20%"], "there is no column '20%'"),
        (["tiny", "--status", "--records", "nowhere"], "nowhere does not exist"),
    ]:
        assert call("reproduce", *words) == 2, words
        assert said in capsys.readouterr().err
    assert call("report", "--paper") == 2
    assert "no records yet" in capsys.readouterr().err
    assert call("report", "--paper", "somewhere") == 2
    assert "remove the run folders" in capsys.readouterr().err
    assert call("report") == 2
    assert "name the runs" in capsys.readouterr().err
