"""Trackers against the real libraries: TensorBoard, Weights & Biases offline, MLflow on a local file store, and CSV."""

import csv
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import mimicfl as mf
from tests.cli.conftest import call
from tests.conftest import wait_until

E = mf.Experiment(rounds=6, epochs=1, num_clients=4, availability="always", checkpoint_every=2)
pytestmark = pytest.mark.usefixtures("at_once")


def interrupted(out, tracker, after):
    """A run that is killed in the middle of a round after its row was sent: the round will be repeated."""

    def progress(experiment, row, total):
        if row["round"] == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mf.run(E, out, progress=progress, callbacks=[tracker])


def only(pattern):
    """The one file or folder that matches."""
    [found] = Path().glob(pattern)
    return found


def call_with_notices(*words):
    """The command, with its warnings as notices and not as errors of the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        return call(*words)


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read.Reload()
        return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


class TestTensorBoard:
    @pytest.mark.slow
    def test_every_round_once_also_after_resume(self, tmp_path):
        pytest.importorskip("tensorboard")
        interrupted("run", mf.callbacks.TensorBoard("logs"), after=3)
        assert [step for step, _ in scalars(only("logs/run-*"))["test_accuracy"]] == [0, 1, 2, 3]
        history = mf.run(E, "run", callbacks=[mf.callbacks.TensorBoard("logs")])
        found = scalars(only("logs/run-*"))
        assert [step for step, _ in found["test_accuracy"]] == [0, 1, 2, 3, 4, 5]
        assert [value for _, value in found["test_loss"]] == pytest.approx([row["test_loss"] for row in history.rows])
        assert "class_accuracy/3" in found

    @pytest.mark.slow
    def test_on_the_command_line_and_sent_later(self, capsys):
        pytest.importorskip("tensorboard")
        words = "--rounds 2 --epochs 1 --clients 4 --availability always".split()
        assert call("compare", "--algorithms", "fedavg", "mimic", "--seeds", "1", *words, "--track", "tensorboard:logs", "--out", "c") == 0
        assert {p.name.rpartition("-")[0] for p in Path("logs").iterdir()} == {"fedavg-s0", "mimic-s0"}
        assert call("track", "send", "c", "--track", "tensorboard:later") == 0
        assert scalars(only("later/mimic-s0-*")) == scalars(only("logs/mimic-s0-*"))


class TestCSV:
    def test_own_metrics_and_resume(self):
        def own(now):
            return {"own": now.row["round"] / 2} if now.row["round"] else None

        history = mf.run(E, "run", callbacks=[own, mf.callbacks.CSV("tables")])
        rows = list(csv.DictReader(only("tables/run-*.csv").read_text().splitlines()))
        assert [row["round"] for row in rows] == [str(k) for k in range(6)]
        assert [row["own"] for row in rows] == ["", "0.5", "1.0", "1.5", "2.0", "2.5"]
        assert [float(row["test_accuracy"]) for row in rows] == [row["test_accuracy"] for row in history.rows]

    def test_a_finished_run_is_not_sent_but_the_user_is_told(self, capsys):
        words = ["run", *"--rounds 2 --epochs 1 --clients 4 --availability always --out r".split()]
        assert call(*words) == 0
        assert "not sent" not in capsys.readouterr().out
        assert call(*words, "--track", "csv:t") == 0
        assert "mimicfl track send r --track csv:t" in " ".join(capsys.readouterr().out.split())
        assert not Path("t").exists()
        assert call("track", "send", "r", "--track", "csv:t") == 0
        capsys.readouterr()
        assert call(*words, "--track", "csv:t") == 0
        assert "not sent" not in capsys.readouterr().out

    def test_two_comparisons_share_a_folder(self):
        for k, lr in enumerate((0.1, 0.2)):
            mf.compare(dataclasses.replace(E, rounds=1, lr=lr), ["fedavg"], [0], f"out{k}", callbacks=[mf.callbacks.CSV("tables")])
        texts = {path.read_text() for path in Path("tables").glob("fedavg-s0-*.csv")}
        assert len(texts) == 2

    def test_resume(self):
        interrupted("run", mf.callbacks.CSV("tables"), after=3)
        mf.run(E, "run", callbacks=[mf.callbacks.CSV("tables")])
        assert [row["round"] for row in csv.DictReader(only("tables/run-*.csv").read_text().splitlines())] == [str(k) for k in range(6)]


class TestMLflow:
    @pytest.mark.slow
    def test_a_server_that_is_down_and_sent_later(self, tmp_path, capsys):
        pytest.importorskip("mlflow")
        words = "--rounds 2 --epochs 1 --clients 4 --availability always --algorithms fedavg mimic --seeds 1 --out c".split()
        assert call_with_notices("compare", *words, "--track", "mlflow:http://127.0.0.1:9") == 0
        assert capsys.readouterr().err.count("mlflow:http://127.0.0.1:9 cannot be reached (Connection refused)") == 1
        assert call("track", "send", "c", "--track", "mlflow:http://127.0.0.1:9") == 2
        assert "Connection refused" in capsys.readouterr().err
        assert call("track", "send", "c", "--track", "mlflow:store") == 0
        assert "4 new rounds of 2 runs sent" in capsys.readouterr().out
        assert call("track", "send", "c", "--track", "mlflow:store") == 0
        assert "0 new rounds of 2 runs sent to mlflow:store; mlflow:store already has all" in capsys.readouterr().out

    @pytest.mark.slow
    def test_one_run_and_every_round_once_also_after_resume(self, tmp_path, monkeypatch):
        pytest.importorskip("mlflow")
        monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
        uri = (tmp_path / "store").as_uri()
        interrupted("run", mf.callbacks.MLflow(uri), after=3)
        history = mf.run(E, "run", callbacks=[mf.callbacks.MLflow(uri)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mlflow import MlflowClient

            client = MlflowClient(uri)
            [run] = client.search_runs([client.get_experiment_by_name("mimicfl").experiment_id])
            steps = client.get_metric_history(run.info.run_id, "test_accuracy")
        assert sorted((m.step, m.value) for m in steps) == [(row["round"], row["test_accuracy"]) for row in history.rows]
        assert run.data.params["algorithm"] == "mimic"
        assert run.info.status == "FINISHED"


class TestWandB:
    @pytest.mark.slow
    def test_offline_with_the_same_id_after_resume(self, tmp_path):
        pytest.importorskip("wandb")
        told = mf.callbacks.WandB("project", offline=True, folder=tmp_path / "w")
        interrupted("run", told, after=3)
        mf.run(E, "run", callbacks=[told])
        assert state_and_steps(told, tmp_path / "w") == (6, [0, 1, 2, 3, 4, 5])

    @pytest.mark.slow
    def test_offline_after_a_kill(self, tmp_path):
        """W&B writes from a process of its own, which loses what it has not written yet when it is killed with the run."""
        pytest.importorskip("wandb")
        code = (
            "import os, signal, mimicfl as mf\nfrom tests.callbacks.test_trackers import E\n"
            "def progress(experiment, row, total):\n    if row['round'] == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
            "mf.run(E, 'run', progress=progress, callbacks=[mf.callbacks.WandB('project', offline=True, folder='w')])"
        )
        env = {key: value for key, value in os.environ.items() if "WANDB_SERVICE" not in key}  # it must not use the process of this one
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
        assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True).returncode == -signal.SIGKILL
        tracker = mf.callbacks.WandB("project", offline=True, folder="w")
        mf.run(E, "run", callbacks=[tracker])
        assert state_and_steps(tracker, Path("w")) == (6, [0, 1, 2, 3, 4, 5])

    @pytest.mark.slow
    def test_no_key_then_sent_offline(self, capsys, monkeypatch):
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_API_KEY", "")
        words = "--rounds 3 --epochs 1 --clients 4 --availability always --out r".split()
        monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
        assert call_with_notices("run", *words, "--track", "wandb:p") == 0
        assert capsys.readouterr().err.count("wandb:p cannot be reached") == 1
        for said in ("3 new rounds of 1 run sent", "0 new rounds"):
            assert call("track", "send", "r", "--track", "wandb:p,offline=true") == 0
            assert said in capsys.readouterr().out
        wait_until(lambda: list(Path().glob("wandb/offline-run-*/run-*.wandb")), "W&B's own process to begin")
        file = only("wandb/offline-run-*/run-*.wandb")  # one: nothing was new the second time
        wait_until(lambda: "exit" in records_of(file)[0], "W&B's own process to write")
        assert records_of(file)[1] == [0, 1, 2]
        shutil.rmtree("wandb")
        assert call("track", "send", "r", "--track", "wandb:p,offline=true") == 0
        assert "3 new rounds" in capsys.readouterr().out


def state_and_steps(tracker, folder):
    """How many rounds the run folder says W&B has, and the steps in the one file of W&B."""
    state = json.loads(Path("run/.tracking.json").read_text())
    wait_until(lambda: list(folder.glob("wandb/offline-run-*/run-*.wandb")), "W&B's own process to begin")
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert file.stem == f"run-{state['id']}"
    wait_until(lambda: "exit" in records_of(file)[0], "W&B's own process to write")
    return state[tracker.spec], records_of(file)[1]


def records_of(file):
    """The kinds of records in a file that W&B writes offline, and the steps of its history."""
    from wandb.proto import wandb_internal_pb2 as messages
    from wandb.sdk.internal.datastore import DataStore

    kinds, steps = set(), []
    store = DataStore()
    store.open_for_scan(str(file))
    while (raw := store.scan_data()) is not None:
        record = messages.Record()
        record.ParseFromString(raw)
        kinds.add(record.WhichOneof("record_type"))
        if record.WhichOneof("record_type") == "history":
            steps.append(record.history.step.num)
    store.close()
    return kinds, steps
