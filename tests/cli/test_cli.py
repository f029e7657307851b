"""The command line as a user types it."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl.experiments.names import algorithm_list, seed_list
from mimicfl.metrics.history import read
from mimicfl.metrics.store import RunFolder
from tests import fork_server
from tests.cli.conftest import call
from tests.conftest import wait_until

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_run_as_documented(capsys):
    words = "run --dataset digits --algorithm mimic --availability time-varying:0.3 --rounds 6 --seed 3 --out DIR".split()
    assert call(*words) == 0
    out = capsys.readouterr().out
    assert "round 6/6" in out
    assert "test accuracy" in out
    assert "mimicfl report DIR" in out
    rows = RunFolder("DIR").rows()
    assert [row["active"] for row in rows] == [9] * 6
    python = mf.run(mf.Experiment(dataset="digits", algorithm="mimic", availability="time-varying:0.3", rounds=6, seed=3))
    assert torch.equal(python.params, read(RunFolder("DIR")).params)


@pytest.mark.slow
def test_toml_and_options_say_the_same_and_options_win(capsys):
    Path("experiment.toml").write_text('algorithm = "fedavg"\navailability = "static:0.3"\nrounds = 9\nbatch-size = 8\n')
    assert call("run", "experiment.toml", "--rounds", 3, "--out", "a") == 0
    assert call("run", "--algorithm", "fedavg", "--availability", "static:0.3", "--rounds", 3, "--batch-size", 8, "--out", "b") == 0
    one, two = RunFolder("a"), RunFolder("b")
    assert one.config == two.config
    assert torch.equal(one.load("final")[0]["params"], two.load("final")[0]["params"])


def test_a_length_on_the_command_line_replaces_the_files(capsys):
    Path("experiment.toml").write_text("uploads = 50\nsteps = 2\n")
    assert call("run", "experiment.toml", "--rounds", 2, "--epochs", 1, "--out", "a") == 0
    assert len(RunFolder("a").rows()) == 2


def test_every_setting_is_an_option(capsys):
    with pytest.raises(SystemExit):
        call("run", "--help")
    text = capsys.readouterr().out
    offered = set(re.findall(r"^ +(--[a-z-]+)", text, re.MULTILINE))  # at the start of a line: not those in the example
    for name in mf.Experiment().to_dict():
        assert ("--plugin" if name == "plugins" else f"--{name.replace('_', '-')}") in offered, name
    assert "--nonsense" not in offered


@pytest.mark.parametrize("command", ["demo", "run", "compare", "sweep", "resume", "report", "data", "availability", "bench"])
def test_every_help_shows_an_example(capsys, command):
    with pytest.raises(SystemExit) as done:
        call(command, "--help")
    assert done.value.code == 0
    assert f"  mimicfl {command}" in capsys.readouterr().out.split("examples:")[1]


@pytest.mark.slow
def test_compare_prints_the_table_and_writes_the_report(capsys):
    assert call("compare", "--algorithms", "fedavg,mimic", "--seeds", "2", "--rounds", 5, "--out", "c") == 0
    out = capsys.readouterr().out
    assert "FedAvg" in out
    assert out.count("○") == 1  # two seeds decide nothing
    assert "±" in out
    assert Path("c/report.html").is_file()
    assert {p.name for p in Path("c").iterdir() if p.is_dir()} == {"fedavg-s0", "fedavg-s1", "mimic-s0", "mimic-s1"}
    assert call("compare", "--algorithms", "fedavg", "mimic", "--seeds", "2", "--rounds", 5, "--out", "c") == 0
    assert "round" not in capsys.readouterr().out.split("into c")[1].split("algorithm")[0]  # nothing trained twice


@pytest.mark.slow
def test_compare_trains_all_runs_together_and_says_on_what():
    said = []
    mf.compare(mf.Experiment(rounds=2), ["fedavg", "scaffold", "mimic"], [0, 1], notice=said.append)
    assert said == ["engine plain"]


@pytest.mark.slow
def test_resume_and_report(capsys):
    call("run", "--rounds", 4, "--out", "r")
    Path("r/final.safetensors").unlink()
    assert call("resume", "r") == 0
    assert call("resume", "r") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert call("report", "r", "--out", "page") == 0
    assert Path("page/report.html").is_file()


@pytest.mark.slow
def test_availability_is_drawn(capsys):
    assert call("availability", "show", "bounded:5", "--clients", 4, "--rounds", 12, "--out", "s.png") == 0
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if "█" in line]) == 4
    assert "tau_max" in out
    assert Path("s.png").read_bytes().startswith(b"\x89PNG")
    assert call("availability", "show", "label-correlated:classes=[0,1]", "--out", "s.svg") == 0
    np.savetxt("m.csv", np.eye(3, dtype=int), fmt="%d", delimiter=",")
    assert call("availability", "show", "explicit:m.csv") == 0
    assert call("availability", "show", "explicit:m.csv", "--clients", "77") == 2  # not silently those of the file


@pytest.mark.slow
def test_bench_checks_then_times(capsys):
    assert call("bench", "--model", "mlp:8", "--cohorts", "2", "--steps", 2, "--repeats", 2) == 0
    out = capsys.readouterr().out
    assert "plain" in out
    assert "off by" in out or "native is missing" in out
    assert call("bench", "--cohorts", "many") == 2
    assert call("bench", "--engines", "warp", "--model", "mlp:8", "--cohorts", "2", "--steps", 1) == 2


def test_data_list(capsys):
    assert call("data", "list") == 0
    out = capsys.readouterr().out
    assert "digits" in out
    assert "not downloaded yet" in out
    assert call("data", "fetch", "digits") == 0


def test_divergence_on_the_command_line(capsys):
    assert call("run", "--dataset", "synthetic", "--availability", "always", "--lr", 50, "--rounds", 400, "--out", "r") == 2
    err = capsys.readouterr().err
    assert "no longer finite in round" in err
    assert "at client" in err
    assert "kept in r" in err


def test_seed_lists():
    assert seed_list("3") == [0, 1, 2]
    assert seed_list("4,7") == [4, 7]
    assert seed_list("4,") == [4]


def test_specs_are_split_at_names_only():
    assert algorithm_list(["fedavg,mimic"]) == ["fedavg", "mimic"]
    assert algorithm_list(["mifa:never_seen=wait,memory=step,fedprox:mu=0.1"]) == ["mifa:never_seen=wait,memory=step", "fedprox:mu=0.1"]
    assert algorithm_list(["own:betas=[0.8,0.9],fedavg"]) == ["own:betas=[0.8,0.9]", "fedavg"]


def test_two_spellings_of_an_algorithm_are_one():
    assert algorithm_list(["fedau", "fedau:cutoff=50", "fedau:", "fedau:20", "fedau:cutoff=20", "mimic", "mimic"]) == [
        "fedau",
        "fedau:20",
        "mimic",
    ]


@pytest.mark.slow
def test_as_a_program_piped_and_on_a_terminal(tmp_path):
    command = [fork_server.programs() / "mimicfl", "run", "--rounds", "3", "--out"]
    piped = subprocess.run([*command, "a"], capture_output=True, text=True)
    assert piped.returncode == 0
    assert "\x1b" not in piped.stdout
    assert "rounds/s" in piped.stdout
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*command, "b"], stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"})
    os.close(theirs)
    seen = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:
            break
        if not chunk:
            break
        seen += chunk
    assert process.wait() == 0
    assert b"\x1b[" in seen  # a bar was drawn


def test_a_preset_for_the_authors_script(capsys):
    assert call("run", "--preset", "authors", "--rounds", 2, "--out", "r") == 0
    config = RunFolder("r").config
    assert config["algorithm"] == "mimic:memory=step"
    assert config["lr"] == "geometric:0.1,0.99,floor=1e-05"
    assert call("resume", "r") == 0


def test_the_id_names_what_the_result_depends_on():
    base = mf.Experiment()
    assert base.id == mf.Experiment(device="auto", checkpoint_every=3).id
    assert base.id == mf.Experiment(**json.loads(json.dumps(base.resolved().to_dict()))).id
    assert base.id != mf.Experiment(seed=1).id


@pytest.mark.slow
def test_a_closed_pipe_does_not_stop_training():
    command = f"{fork_server.programs() / 'mimicfl'} run --rounds 40 --out r | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert all(line.startswith("mimicfl: notice:") for line in done.stderr.splitlines())
    assert RunFolder("r").finished


@pytest.mark.slow
def test_closed_and_full_outputs():
    run = f"{sys.executable} -m mimicfl run --rounds 2 --out"
    assert subprocess.run(f"{run} a >&-", shell=True).returncode == 0
    full = subprocess.run(f"{run} b > /dev/full", shell=True, capture_output=True, text=True)
    assert full.returncode == 2
    assert "No space left" in full.stderr
    assert "Traceback" not in full.stderr
    ascii_only = subprocess.run(
        [sys.executable, "-m", "mimicfl", "availability", "show", "always"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": ""},
        capture_output=True,
    )
    assert ascii_only.returncode == 0


@pytest.mark.slow
def test_an_interrupt_prints_one_line_that_names_the_folder():
    process = subprocess.Popen(
        [sys.executable, "-m", "mimicfl", "run", "--rounds", "100000", "--out", "r"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests in the background ignores it
    )
    rows = Path("r/rows.jsonl")
    wait_until(lambda: process.poll() is not None or (rows.exists() and rows.stat().st_size >= 500), "the first rounds")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert "mimicfl resume r" in errors
    assert "Traceback" not in errors


def test_an_interrupt_during_import_prints_no_traceback(tmp_path):
    """The program that pyproject.toml declares, with a PyTorch that takes forever to import."""
    module, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["mimicfl"].split(":")
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\nwhile True: time.sleep(0.01)")
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; from {module} import {name}; sys.exit({name}())", "data", "list"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests in the background ignores it
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors == "\nmimicfl: stopped before anything was started\n"


@pytest.mark.slow
def test_compare_in_toml_and_resume_of_its_folder(capsys):
    Path("e.toml").write_text('algorithms = ["fedavg", "mimic"]\nseeds = [4]\nrounds = 3\n')
    assert call("compare", "e.toml", "--out", "c") == 0
    assert {p.name for p in Path("c").iterdir() if p.is_dir()} == {"fedavg-s4", "mimic-s4"}
    Path("c/mimic-s4/final.safetensors").unlink()
    assert call("resume", "c") == 0
    assert RunFolder("c/mimic-s4").finished
    assert call("compare", "--out", "c/mimic-s4") == 2
    assert "is itself a run folder" in capsys.readouterr().err


@pytest.mark.slow
def test_settings_that_do_not_matter_do_not_make_another_run(capsys):
    assert call("run", "--rounds", 2, "--lr", "0.05", "--out", "r") == 0
    Path("e.toml").write_text("rounds = 2\nlr = 0.05\ncheckpoint_every = 7\n")
    assert call("run", "e.toml", "--device", "auto", "--out", "r") == 0
    np.savetxt("m.csv", np.ones((3, 30), dtype=int), fmt="%d", delimiter=",")
    capsys.readouterr()
    assert call("run", "--availability", "explicit:m.csv", "--out", "x") == 0
    assert "m.csv, seed 0 -> x" in capsys.readouterr().out  # the schedule is as long as it is: no length to tell
    Path("x/final.safetensors").unlink()
    here = Path.cwd()
    os.chdir("/")
    assert call("resume", here / "x") == 0
