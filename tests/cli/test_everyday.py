"""What people expect of a command line: a dry run, completion, quick answers, names that can be read."""

import io
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mimicfl as mf
from mimicfl.cli.train import default_folder
from mimicfl.metrics.store import RunFolder
from tests.cli.conftest import call
from tests.conftest import ROOT

SMALL = "--rounds 2 --epochs 1 --clients 4 --availability always".split()
GRID = """rounds = 2
epochs = 1
num_clients = 4
availability = "always"
[grid]
algorithm = ["fedavg", "mimic"]
lr = [0.05, 0.1]
seed = 1
"""
NO_TORCH = """
import sys
sys.modules["torch"] = None
import mimicfl_command
sys.argv = ["mimicfl", *sys.argv[1:]]
sys.exit(mimicfl_command.main())
"""


def without_torch(*words):
    """Run a command in a process in which PyTorch cannot be imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}
    done = subprocess.run([sys.executable, "-c", NO_TORCH, *map(str, words)], capture_output=True, text=True, env=environment)
    assert done.returncode in (0, 2), done.stderr
    return done


class TestQuick:
    def test_version_help_and_misspelt_commands_do_not_import_pytorch(self):
        assert without_torch("--version").stdout == f"mimicfl {mf.__version__}\n"
        assert "compare" in without_torch("--help").stdout
        assert "did you mean 'compare'" in without_torch("comapre").stderr

    @pytest.mark.slow
    def test_a_finished_sweep_repeats_without_pytorch(self, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "120")
        Path("grid.toml").write_text(GRID)
        assert call("sweep", "grid.toml") == 0
        first = capsys.readouterr().out
        again = without_torch("sweep", "grid.toml")
        assert "all runs are finished" in again.stdout
        table = [line.rstrip() for line in first.splitlines() if "%" in line and "rounds/s" not in line]
        assert table
        assert table == [line.rstrip() for line in again.stdout.splitlines() if "%" in line]

    @pytest.mark.slow
    def test_a_changed_sweep_does_not_repeat_from_memory(self, capsys):
        Path("grid.toml").write_text(GRID)
        assert call("sweep", "grid.toml") == 0
        capsys.readouterr()
        Path("runs/grid/lr=0.05/fedavg-s0/final.safetensors").unlink()
        assert call("sweep", "grid.toml") == 0
        assert "all runs are finished" not in capsys.readouterr().out
        assert RunFolder("runs/grid/lr=0.05/fedavg-s0").finished
        assert call("sweep", "grid.toml") == 0
        assert "all runs are finished" in capsys.readouterr().out
        Path("grid.toml").write_text(GRID.replace("seed = 1", "seed = 2"))
        assert call("sweep", "grid.toml") == 0
        assert RunFolder("runs/grid/lr=0.1/mimic-s1").finished


class TestSweepOptions:
    @pytest.mark.slow
    def test_options_replace_the_file_and_the_grid(self, capsys):
        Path("grid.toml").write_text(GRID)
        assert call("sweep", "grid.toml", "--seeds", "4,7", "--algorithms", "fedavg", "--lr", "0.2", "--uploads", 1, "--out", "s") == 0
        assert {str(p.parent) for p in Path("s").glob("**/config.toml")} == {"s/fedavg-s4", "s/fedavg-s7"}
        config = RunFolder("s/fedavg-s4").config
        assert (config["lr"], config["uploads"], config.get("rounds")) == (0.2, 1, None)

    def test_a_wrong_option_is_not_blamed_on_the_file(self, capsys):
        Path("grid.toml").write_text(GRID)
        assert call("sweep", "grid.toml", "--rounds", "ten") == 2
        err = capsys.readouterr().err
        assert "rounds" in err
        assert "grid.toml" not in err


class TestDryRun:
    @pytest.mark.slow
    @pytest.mark.parametrize("words", [["run"], ["compare", "--algorithms", "fedavg", "mimic", "--seeds", "2"]])
    def test_nothing_is_written(self, capsys, words):
        assert call(*words, *SMALL, "--dry-run") == 0
        out = capsys.readouterr().out
        assert "new" in out
        assert "time" in out
        assert "memory" in out
        assert not Path("runs").exists()

    def test_says_what_is_finished_and_where_a_run_resumes(self, capsys):
        assert call("run", *SMALL, "--out", "r") == 0
        capsys.readouterr()
        assert call("run", *SMALL, "--out", "r", "--dry-run") == 0
        assert "nothing to do" in capsys.readouterr().out
        assert call("run", *SMALL, "--rounds", 5, "--out", "r", "--dry-run") == 0
        assert "resumes after round 2" in capsys.readouterr().out
        assert len(RunFolder("r").rows()) == 2

    def test_of_a_sweep(self, capsys):
        Path("grid.toml").write_text(GRID)
        assert call("sweep", "grid.toml", "--dry-run") == 0
        assert "4 of 4 runs to train, 8 rounds" in capsys.readouterr().out
        assert not Path("runs").exists()


def test_config_show_says_where_values_come_from(capsys):
    Path("e.toml").write_text('algorithm = "fedavg"\npreset = "authors"\n')
    assert call("config", "show", "e.toml", "--rounds", "3") == 0
    out = capsys.readouterr().out
    lines = {line.split(" = ")[0]: line for line in out.splitlines() if " = " in line and not line.startswith("#")}
    assert "option" in lines["rounds"]
    assert "e.toml" in lines["algorithm"]
    assert "default for digits" in lines["batch_size"]
    assert "preset authors" in lines["lr"]
    assert "default" in lines["weighting"]
    assert tomllib.loads(out)["rounds"] == 3


class TestFolders:
    def test_default_names_are_short_and_differ(self):
        e = mf.Experiment()
        name = default_folder(e).name
        assert name.startswith("mimic-digits-")
        assert len(name) < 24
        assert default_folder(mf.Experiment(lr=0.5)).name != name
        assert "s3" in default_folder(mf.Experiment(seed=3)).name

    def test_a_default_folder_of_version_0_2_is_left_alone(self):
        """Its runs cannot be resumed, so the same command must not end there."""
        e = mf.Experiment()
        (Path("runs") / e.name).mkdir(parents=True)
        assert default_folder(e) != Path("runs") / e.name

    @pytest.mark.slow
    def test_a_report_of_two_runs_leaves_their_own_pages_alone(self, capsys):
        for name in ("a", "b"):
            assert call("run", *SMALL, "--out", f"runs/{name}", "--algorithm", "mimic" if name == "a" else "fedavg") == 0
            assert call("report", f"runs/{name}") == 0
        before = {name: Path(f"runs/{name}/report.html").read_text() for name in ("a", "b")}
        assert call("report", "runs/a", "runs/b") == 0
        assert Path("runs/report-a-b/report.html").is_file()
        assert before == {name: Path(f"runs/{name}/report.html").read_text() for name in ("a", "b")}
        assert call("report", "runs/a", "runs/b", "--out", "told") == 0
        assert Path("told/report.html").is_file()


class TestCompletion:
    def script(self, capsys, shell):
        assert call("completion", shell) == 0
        return capsys.readouterr().out

    def complete(self, script, line):
        """What bash offers at the end of the line."""
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _mimicfl; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
        return done.stdout.split()

    def test_bash(self, capsys):
        script = self.script(capsys, "bash")
        assert self.complete(script, "mimicfl sw") == ["sweep"]
        assert "runs" in self.complete(script, "mimicfl ")
        assert self.complete(script, "mimicfl run --algorithm mim") == ["mimic"]
        assert self.complete(script, "mimicfl compare --algorithms fedavg mim") == ["mimic"]
        assert self.complete(script, "mimicfl compare --algorithms fedavg --out mim") == []
        assert self.complete(script, "mimicfl compare --algorithms fedavg mimic --dry") == ["--dry-run"]
        assert self.complete(script, "mimicfl run --dry") == ["--dry-run"]
        assert self.complete(script, "mimicfl run --update ") == ["sum", "mean"]
        assert self.complete(script, "mimicfl data f") == ["fetch"]
        assert self.complete(script, "mimicfl run --out ") == []  # files, by the shell

    @pytest.mark.parametrize("shell", ["zsh", "fish"])
    def test_other_shells(self, capsys, shell):
        script = self.script(capsys, shell)
        for word in ("sweep", "dry-run", "mimic", "completion"):
            assert word in script
        if shutil.which(shell):
            assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).returncode == 0

    @pytest.mark.skipif(shutil.which("fish") is None, reason="no fish on this machine")
    @pytest.mark.parametrize(
        ("line", "offered"), [("run --algorithm mim", "mimic"), ("compare --algorithms fedavg mim", "mimic"), ("sw", "sweep")]
    )
    def test_fish(self, capsys, line, offered):
        ask = f"{self.script(capsys, 'fish')}\ncomplete -C 'mimicfl {line}'"
        done = subprocess.run(["fish", "--no-config"], input=ask, capture_output=True, text=True, check=True)
        assert [word.split("\t")[0] for word in done.stdout.splitlines()] == [offered]


def test_the_memo_is_data(capsys):
    """A memo that was edited is ignored or printed as text; it cannot control the terminal."""
    from rich.console import Console

    from mimicfl.cli.finished import Memo

    Path("grid.toml").write_text(GRID)
    Path("out").mkdir()
    console = Console(file=io.StringIO(), width=100)
    memo = Memo.of(Path("out"), "grid.toml", {}, console)
    for text in ("", "[]", '{"key": 3}', json.dumps({"key": memo.key, "files": {"nowhere": [1, 2]}, "shown": "x"})):
        Path("out/.finished.json").write_text(text)
        assert not memo.replay(console)


def test_the_bare_command_prints_its_help(capsys):
    with pytest.raises(SystemExit) as done:
        call()
    assert done.value.code == 0
    assert "mimicfl demo" in capsys.readouterr().out


def test_a_sweep_explains_its_verdicts_once(capsys):
    Path("grid.toml").write_text(GRID)
    assert call("sweep", "grid.toml") == 0
    assert capsys.readouterr().out.count("Undecided:") == 1
