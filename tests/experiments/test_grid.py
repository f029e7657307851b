"""Sweeps from a file: every combination once, in a folder that says what it is; mistakes told in a sentence."""

from pathlib import Path

import pytest

import mimicfl as mf
from mimicfl.cli.main import main
from mimicfl.experiments.grid import cells, read_sweep

GRID = """
rounds = 2
num-clients = 6
[grid]
algorithm = ["fedavg", "mimic"]
availability = ["static:0.5", "always"]
lr = [0.1, 0.01]
seed = 2
"""


def write(tmp_path, text):
    file = tmp_path / "grid.toml"
    file.write_text(text)
    return file


def test_every_combination_has_a_name_of_its_own(tmp_path):
    plan = read_sweep(write(tmp_path, GRID))
    assert len(plan) == 16
    e = plan["static_0.5-lr=0.01/mimic-s1"]
    assert (e.algorithm, e.availability, e.lr, e.seed, e.rounds, e.num_clients) == ("mimic", "static:0.5", 0.01, 1, 2, 6)
    assert set(cells(plan)) == {"static_0.5-lr=0.1", "static_0.5-lr=0.01", "always-lr=0.1", "always-lr=0.01"}
    assert list(read_sweep(write(tmp_path, "rounds = 1\n[grid]\nseed = [4, 7]"))) == ["mimic-s4", "mimic-s7"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds = 1", "has no [grid]"),
        ("[grid]\n", "has no [grid]"),
        ("[grid]\nalgorithm = 'mimic'", "must be a list of values"),
        ("[grid]\nseed = []", "must be a list of values"),
        ("[grid]\nalgorithms = ['mimic']", "did you mean 'algorithm'?"),
        ("seed = 1\n[grid]\nseed = 3", "both at the top and in the grid"),
        ("[grid]\nlr = [0.1, 0.1]", "a value appears twice"),
        ("[grid]\nmomentum = [0, 0.0]", "would be the same run: a value appears twice"),
        ("[grid]\nseed = 100\nlr = [0.1, 0.2]\nrounds = [" + "1," * 999 + "2]", "the number of runs"),
        ("[grid]\nrounds = ['many']", "rounds must be a whole number"),
        ("[grid", "not valid TOML"),
    ],
)
def test_mistakes(tmp_path, text, words):
    with pytest.raises(mf.UsageError) as error:
        read_sweep(write(tmp_path, text))
    assert words in str(error.value)


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, GRID.replace("lr = [0.1, 0.01]\n", ""))
    assert main(["sweep", "grid.toml"]) == 0
    out = capsys.readouterr().out
    assert "8 runs into runs/grid" in out
    assert "[8/8]" in out
    for cell in ("static_0.5", "always"):
        assert (Path("runs/grid") / cell / "report.html").is_file()
        assert f"\n{cell}\n" in out
    assert out.index("\nstatic_0.5\n") < out.index("\nall settings\n") < out.index("runs/grid/report.html")  # all at a glance, last
    assert main(["sweep", "grid.toml"]) == 0
    assert "[1/8]" not in capsys.readouterr().out  # nothing is trained twice
    (Path("runs/grid/always/mimic-s0/final.safetensors")).unlink()
    (Path("runs/grid/always/mimic-s1/final.safetensors")).unlink()
    assert main(["resume", "runs/grid"]) == 0
    assert "resuming 2 runs" in capsys.readouterr().out
    assert main(["sweep", "nothing.toml"]) == 2
    assert main(["sweep", "grid.toml", "--engine", "warp"]) == 2


@pytest.mark.slow
def test_a_setting_added_later_is_shown_at_its_default_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, 'rounds = 2\nnum-clients = 6\n[grid]\nalgorithm = ["fedavg", "mimic"]\nmomentum = [0.0, 0.5]\nseed = 1\n')
    assert main(["sweep", str(file), "--out", "found"]) == 0
    assert main(["report", "found"]) == 0
    shown = capsys.readouterr().out
    assert "momentum 0.0" in shown
    assert "None" not in shown
    assert set(mf.frame("found")["momentum"]) == {0.0, 0.5}
    assert main(["run", "--rounds", "2", "--num-clients", "6", "--momentum", "0.5", "--out", "found/momentum=0.0/mimic-s0"]) == 2
    assert "momentum is 0.0 there and 0.5 here" in capsys.readouterr().err
