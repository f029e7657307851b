"""The app written by `mimicfl flower new`: run in one process and resumed; settings, availability and error messages."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import mimicfl as mf
import mimicfl.flower as mff
from mimicfl.cli.main import main
from mimicfl.errors import UsageError
from mimicfl.flower.app import make_strategy
from mimicfl.flower.new_app import new_app
from mimicfl.metrics.store import RunFolder
from tests import fork_server
from tests.conftest import BUILT_IN
from tests.flower.problems import N, app, flat, problem, simulated


def run(*command, folder):
    python = sys.executable if command[0] == "-c" else fork_server.programs() / "python"  # what is imported matters only to -c
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(folder), "PYTHONWARNINGS": "ignore"}
    return subprocess.run([python, *map(str, command)], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_template_runs_and_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["flower", "new", "My digits"]) == 0
    assert "python try_it.py" in capsys.readouterr().out
    target = tmp_path / "My digits"
    for rounds in (2, 4):
        done = run("try_it.py", f"num-rounds={rounds}", f"folder='{tmp_path / 'run'}'", folder=target)
        assert done.returncode == 0, done.stderr
    assert "resumed after round 2" in done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    assert [row["answered"] for row in rows] == [["0", "1", "2"]] * 4
    assert rows[-1]["test_accuracy"] > 0.3
    data = mf.datasets.load("digits")
    local = mf.LocalSGD(epochs=1, batch_size=16, lr="geometric:0.1,0.99")
    split = mf.partition.dirichlet(data.y_train, 3, alpha=0.3, seed=0)
    expected = mf.simulate(mf.models.build("mlp", data, seed=0), data, split, "mimic", "always", 4, local=local, engine="plain")
    assert torch.equal(RunFolder(tmp_path / "run").load("final")[0]["params"], expected.params)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "MimiC ends at" in capsys.readouterr().out


@pytest.mark.slow
def test_template_runs_secure_rounds_in_one_process(tmp_path):
    target = new_app(tmp_path / "hidden")
    for rounds in (1, 2):  # the second run finds the clients' corrections
        done = run("try_it.py", f"num-rounds={rounds}", 'form="secure"', "clip=256.0", f"folder='{tmp_path / 'run'}'", folder=target)
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    assert [row["answered"] for row in rows] == [["0", "1", "2"]] * 2


def test_template_has_no_unfilled_placeholders(tmp_path):
    target = new_app(tmp_path / "ward-7")
    files = sorted(str(file.relative_to(target)) for file in target.rglob("*") if file.is_file())
    assert files == [
        "README.md",
        "pyproject.toml",
        "try_it.py",
        *(f"ward_7/{n}.py" for n in ("__init__", "client_app", "server_app", "task")),
    ]
    assert all("$" not in file.read_text().replace("$ f", "") for file in target.rglob("*") if file.is_file())


@pytest.mark.parametrize(("name", "message"), [("7up", "Python package"), ("torch", "would hide"), ("full", "is not empty")])
def test_unusable_folders_are_refused(tmp_path, name, message, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["flower", "new", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_importing_mimicfl_does_not_import_flower(tmp_path):
    assert run("-c", "import sys, mimicfl, mimicfl.cli.main; sys.exit('flwr' in sys.modules)", folder=tmp_path).returncode == 0


@pytest.mark.slow
def test_missing_flower_is_a_one_line_error_with_exit_code_2(tmp_path):
    hide = "import sys; sys.modules['flwr'] = None; "
    done = run("-c", hide + "from mimicfl.cli.main import main; sys.exit(main(['flower', 'new', 'x']))", folder=tmp_path)
    assert (done.returncode, done.stderr) == (2, "mimicfl: Flower is not installed: pip install 'mimicfl[flower]'\n")
    done = run("-c", hide + "from mimicfl.flower import MimiC", folder=tmp_path)
    assert "MissingFlower: Flower is not installed" in done.stderr


@pytest.mark.slow
def test_availability_pattern_selects_the_clients():
    """A pattern in the run config selects the same clients as in the simulator."""
    kept = {}
    server = mff.server_app(lambda: problem()[2], num_rounds=8, algorithm="mifa", lr="geometric:0.05,0.8", num_clients=N, seed=4)
    original = mff.Federated.start

    def start(self, *arguments, **options):
        kept["result"], kept["strategy"] = original(self, *arguments, **options), self
        return kept["result"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mff.Federated, "start", start)
        mff.simulate(server, app(), N, {"availability": "markov:0.4,0.4", "unrelated": 1})
    available = mf.availability.schedule("markov:0.4,0.4", 8, N, seed=4)
    assert 0 < available.sum() < available.size
    found = [[str(i) in row["answered"] for i in range(N)] for row in kept["strategy"].rows]
    assert np.array_equal(np.array(found), available)
    assert torch.equal(flat(kept["result"].arrays), simulated("mifa", available, seed=4).params)


def test_label_correlated_availability_needs_class_counts():
    from tests.flower.problems import LOCAL, federate

    pattern = "label-correlated:classes=[1],rare=0.0,common=1.0"
    base = {"lr": LOCAL.lr, "num_clients": N, "fraction_evaluate": 0.0, "availability": pattern}
    with pytest.raises(UsageError, match="needs labelled classes"):
        federate(mff.MimiC(**base), 1)
    strategy = mff.MimiC(class_counts=[[9, 0], [0, 9], [9, 9], [9, 0], [9, 0]], **base)
    federate(strategy, 2)
    assert [row["answered"] for row in strategy.rows] == [["0", "3", "4"]] * 2


def test_forms_are_selected_by_name():
    options = {"num_clients": 4, "lr": 0.1}
    assert isinstance(make_strategy([], {"form": "secure", "clip": 3.0, **options}).form, mff.SecureForm)
    assert type(make_strategy([], {"form": "client", **options}).form) is mff.ClientForm
    assert type(make_strategy([], {"algorithm": "scaffold", **options}).form) is mff.ServerForm


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "client", "algorithm": "mifa"}, "needs an algorithm"),
        ({"form": "secure", "weighting": "samples"}, "weighting"),
        ({"form": "cloud"}, "form 'cloud' is unknown"),
    ],
)
def test_incompatible_and_unknown_settings_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        make_strategy([], options)
    with pytest.raises(UsageError, match="did you mean 'num_rounds'"):
        mff.server_app(lambda: None, num_round=3)


def test_folder_of_another_federation_is_refused(tmp_path):
    from tests.flower.problems import federate

    base = {"fraction_evaluate": 0.0, "wait_for": N, "folder": tmp_path / "run"}
    federate(mff.MimiC(lr=0.05, **base), 1)
    with pytest.raises(UsageError, match="holds a different run"):
        federate(mff.FedAvg(lr=0.05, **base), 1)
    with pytest.raises(UsageError, match="another model"):
        federate(mff.MimiC(lr=0.05, **base), 1, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("name", [kind.__name__ for name, kind in BUILT_IN.items() if name != "known-p"])  # nobody knows the rates here
def test_resumed_run_equals_an_uninterrupted_one(name, tmp_path):
    from tests.flower.problems import LOCAL, federate

    base = {"fraction_evaluate": 0.0, "lr": LOCAL.lr, "num_clients": N, "wait_for": N, "availability": "static:0.6"}
    uninterrupted = getattr(mff, name)(**base)
    federate(uninterrupted, 6)
    for rounds in (1, 4, 6):
        resumed = getattr(mff, name)(folder=tmp_path / "run", **base)
        federate(resumed, rounds)
    assert torch.equal(resumed.form.w, uninterrupted.form.w)
    assert [row["answered"] for row in resumed.rows] == [row["answered"] for row in uninterrupted.rows]
    assert resumed.rows[-1]["bytes_up"] == uninterrupted.rows[-1]["bytes_up"]
