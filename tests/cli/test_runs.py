"""`mimicfl runs`: a list of runs with their status, last values and settings."""

import csv
import io
from pathlib import Path

import pytest

import mimicfl as mf
from mimicfl.metrics.store import RunFolder
from tests.cli.conftest import call
from tests.cli.test_everyday import SMALL, without_torch


@pytest.fixture
def three(tmp_path, capsys):
    """A finished run, an interrupted one and a damaged one."""
    for name, algorithm in (("one", "fedavg"), ("two", "mimic")):
        mf.run(mf.Experiment(algorithm=algorithm, rounds=2, epochs=1, num_clients=4, availability="always"), f"runs/{name}")
    Path("runs/two/final.safetensors").unlink()
    Path("runs/three").mkdir()
    Path("runs/three/config.toml").write_text("not toml [")


def listed(capsys, *words):
    assert call("runs", *words, "--csv") == 0
    return {Path(row["run"]).name: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}


class TestRuns:
    def test_status_settings_that_differ_and_last_accuracy(self, three, capsys):
        found = listed(capsys)
        assert {name: row["status"] for name, row in found.items()} == {"one": "finished", "two": "interrupted", "three": "damaged"}
        accuracy = RunFolder("runs/one").rows()[-1]["test_accuracy"]
        assert found["one"]["test accuracy"] == f"{100 * accuracy:.1f} %"
        assert found["one"]["algorithm"] == "fedavg"
        assert found["two"]["rounds"] == "2"
        assert "num_clients" not in found["one"]

    def test_a_run_that_is_being_written_is_running(self, three, capsys):
        folder = RunFolder.claim("runs/two", RunFolder("runs/two").config)
        try:
            assert listed(capsys)["two"]["status"] == "running"
        finally:
            folder.close()

    def test_a_lock_that_cannot_be_opened_is_not_a_running_process(self, three, capsys):
        Path("runs/two/.lock").unlink()
        Path("runs/two/.lock").mkdir()
        assert listed(capsys)["two"]["status"] == "interrupted"

    def test_settings_that_do_not_fit_are_left_out_and_named(self, three, capsys, monkeypatch):
        config = Path("runs/two/config.toml")
        config.write_text(config.read_text().replace('availability = "always"', 'availability = "label-correlated:rare=0.02,common=0.15"'))
        for columns, shown in (("80", False), ("200", True)):
            monkeypatch.setenv("COLUMNS", columns)
            assert call("runs") == 0
            out = capsys.readouterr().out
            assert ("label-correlated:rare=0.02,common=0.15" in out) == shown
            assert ("not shown" in out and "availability; --csv" in out) != shown
            [line] = [line for line in out.splitlines() if "runs/one" in line]  # one line per run
            assert "fedavg" in line
        assert "label-correlated" in listed(capsys)["two"]["availability"]

    def test_rounds_are_listed_once(self, three, capsys):
        config = Path("runs/two/config.toml")
        config.write_text(config.read_text().replace("rounds = 2", "rounds = 9"))
        assert call("runs", "--csv") == 0
        assert capsys.readouterr().out.splitlines()[0].split(",").count("rounds") == 1

    def test_a_spreadsheet_shows_foreign_text_as_text(self, three, capsys):
        config = Path("runs/two/config.toml")
        config.write_text(config.read_text().replace('algorithm = "mimic"', 'algorithm = "=cmd()\\u001b[2J"'))
        found = listed(capsys)["two"]
        assert found["algorithm"] == r"'=cmd()\x1b[2J"

    def test_foreign_numbers_of_any_size(self, three, capsys):
        with Path("runs/two/rows.jsonl").open("a") as rows:
            rows.write(f'{{"round": 1, "test_accuracy": {10**400}, "test_loss": NaN}}\n')
        config = Path("runs/one/config.toml")
        config.write_text(config.read_text().replace("seed = 0", f"seed = {10**400}"))
        found = listed(capsys, "--filter", "status!=damaged", "--sort", "seed")
        assert found["one"]["seed"] == str(10**400)
        assert found["two"]["test accuracy"].endswith("%")
        config.write_text(config.read_text().replace(f"seed = {10**400}", f"seed = 0x{'f' * 9000}"))
        assert listed(capsys)["one"]["status"] == "damaged"

    def test_the_main_metric_of_the_task(self, capsys):
        assert call("run", *SMALL, "--task", "classification", "--metrics", "macro-f1,accuracy", "--out", "runs/f1") == 0
        assert "test macro F1" in capsys.readouterr().out.splitlines()[-2]
        assert listed(capsys)["f1"]["test macro F1"].endswith("%")

    def test_filter_and_sort(self, three, capsys):
        assert list(listed(capsys, "--filter", "algorithm=mi*")) == ["two"]
        assert list(listed(capsys, "--filter", "status!=damaged", "rounds>=2", "--sort", "algorithm", "--reverse")) == ["two", "one"]
        assert list(listed(capsys, "--filter", "accuracy>2")) == []
        assert list(listed(capsys, "--filter", "seed=0.0", "--sort", "algorithm")) == ["one", "two"]

    @pytest.mark.parametrize(
        ("words", "answer"), [(["--filter", "algoritm=x"], "algorithm"), (["--sort", "sed"], "seed"), (["--filter", "mimic"], "KEY=VALUE")]
    )
    def test_mistakes(self, three, capsys, words, answer):
        assert call("runs", *words) == 2
        assert answer in capsys.readouterr().err

    @pytest.mark.slow
    def test_without_pytorch(self, three):
        done = without_torch("runs")
        assert "interrupted" in done.stdout
        assert done.returncode == 0
