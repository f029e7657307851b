"""The run folder: what is in it, and what happens when it is damaged, foreign, or cannot be written."""

import json
import os
import resource
import subprocess
import sys
import tomllib

import pytest
import torch

import mimicfl as mf
from mimicfl import files
from mimicfl.config import from_dict, read_toml
from mimicfl.metrics.history import read
from mimicfl.metrics.store import RunFolder, find_runs
from mimicfl.runner import resume
from mimicfl.toml import dumps


@pytest.fixture
def finished(tmp_path):
    mf.run(mf.Experiment(rounds=3, availability="static:0.3"), tmp_path / "run")
    return tmp_path / "run"


def test_what_is_in_a_folder(finished):
    names = {p.name for p in finished.iterdir() if not p.name.startswith(".")}
    assert names == {"config.toml", "rows.jsonl", "checkpoint.safetensors", "final.safetensors", "env.json"}
    settings = tomllib.loads((finished / "config.toml").read_text())
    assert settings["model"] == "mlp"  # "auto" is resolved, so a later default cannot change this run
    assert json.loads((finished / "env.json").read_text())["torch"] == torch.__version__
    assert len((finished / "rows.jsonl").read_text().splitlines()) == 3


def test_a_run_that_goes_on_elsewhere_says_so(finished):
    (finished / "final.safetensors").unlink()
    made = json.loads((finished / "env.json").read_text())
    (finished / "env.json").write_text(json.dumps(made | {"torch": "1.0", "started": "long ago"}))
    for _ in range(2):
        mf.run(mf.Experiment(rounds=3, availability="static:0.3"), finished)  # the second time there is nothing left to do
    assert json.loads((finished / "env.json").read_text()) == made | {"torch": f"1.0, then {torch.__version__}", "started": "long ago"}


def test_reading_gives_the_same_history(finished):
    history, again = mf.run(mf.Experiment(rounds=3, availability="static:0.3")), read(RunFolder(finished))
    assert torch.equal(history.params, again.params)
    assert history.client_accuracy == again.client_accuracy
    assert (history.class_counts == again.class_counts).all()
    assert (history.available == again.available).all()


def test_a_run_is_read_back_with_its_model(finished, tmp_path):
    history = mf.read(finished)
    assert history.model() is not history.model()
    trained = torch.cat([p.reshape(-1) for p in history.model().parameters()]).detach()
    assert torch.equal(trained, history.params)
    accuracy = history.rows[-1]["test_accuracy"]
    assert (
        repr(history)
        == f"History(mimic, static:0.3, 3 rounds, 30 clients, test_accuracy {accuracy:.4g}, test_loss {history.last('test_loss'):.4g})"
    )
    data = mf.datasets.load("digits")
    mf.simulate(mf.models.MLP(64, 8, 10), data, mf.partition.iid(data.y_train, 4), rounds=1, out=tmp_path / "python")
    with pytest.raises(ValueError, match=r"load history\.params into your own module"):
        mf.read(tmp_path / "python").model()


def test_many_runs_as_one_frame(tmp_path):
    mf.compare(mf.Experiment(rounds=2, epochs=1), ["fedavg", "mimic"], [0, 1], tmp_path / "a")
    mf.run(mf.Experiment(rounds=2, epochs=1, lr=0.5, seed=1), tmp_path / "b")
    frame = mf.frame(tmp_path / "a", tmp_path / "b")
    assert len(frame) == 10
    assert list(frame.columns[:6]) == ["run", "algorithm", "availability", "seed", "lr", "round"]
    ends = frame[frame["round"] == 1].groupby(["algorithm", "lr"])["test_accuracy"].count()
    assert ends.to_dict() == {("fedavg", "geometric:0.1,0.99"): 2, ("mimic", "geometric:0.1,0.99"): 2, ("mimic", 0.5): 1}


def test_a_torn_last_row_is_ignored(finished):
    with (finished / "rows.jsonl").open("a") as file:
        file.write('{"round": 3, "act')
    assert len(RunFolder(finished).rows()) == 3


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "foreign"])
def test_a_damaged_checkpoint_is_named(finished, harm):
    (finished / "final.safetensors").unlink()
    file = finished / "checkpoint.safetensors"
    content = bytearray(file.read_bytes())
    if harm == "flip":
        content[-5] ^= 4
    file.write_bytes({"cut": content[:-40], "flip": content, "empty": b"", "foreign": b"PK\x03\x04 not ours" * 50}[harm])
    with pytest.raises(mf.UsageError, match=r"checkpoint.safetensors is damaged.*delete it"):
        resume(finished)
    file.unlink()
    resume(finished)
    assert RunFolder(finished).finished


def test_rows_that_are_gone_are_noticed(finished):
    (finished / "final.safetensors").unlink()
    (finished / "rows.jsonl").write_text("")
    with pytest.raises(mf.UsageError, match="0 good rows, but the run had reached round 3"):
        resume(finished)


def test_a_checkpoint_of_another_run_is_refused(finished, tmp_path):
    mf.run(mf.Experiment(rounds=3, availability="static:0.3", seed=8), tmp_path / "other")
    (finished / "final.safetensors").unlink()
    (finished / "checkpoint.safetensors").write_bytes((tmp_path / "other" / "checkpoint.safetensors").read_bytes())
    with pytest.raises(mf.UsageError, match=r"different run|does not belong"):
        resume(finished)


@pytest.mark.parametrize("content", ["not = [toml", "\x00\xff", "rounds = 3\nalgoritm = 'mimic'\n"])
def test_a_foreign_config_is_refused(tmp_path, content):
    (tmp_path / "config.toml").write_bytes(content.encode("latin-1"))
    with pytest.raises(mf.UsageError, match=r"config.toml"):
        resume(tmp_path)


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(mf.UsageError, match=r"not empty and not a run folder \(it holds thesis.tex\)"):
        mf.run(mf.Experiment(rounds=2), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"
    with pytest.raises(mf.UsageError, match="is not a run folder"):
        resume(tmp_path)
    with pytest.raises(mf.UsageError, match="holds no run"):
        find_runs([tmp_path])
    with pytest.raises(mf.UsageError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])


def test_another_experiment_does_not_overwrite(finished):
    before = (finished / "rows.jsonl").read_bytes()
    with pytest.raises(mf.UsageError, match=r"holds a different run \(algorithm is 'mimic' there and 'fedavg' here\)"):
        mf.run(mf.Experiment(rounds=3, availability="static:0.3", algorithm="fedavg"), finished)
    assert (finished / "rows.jsonl").read_bytes() == before


def test_a_full_disk_stops_in_words_and_loses_nothing(tmp_path, monkeypatch):
    e = mf.Experiment(rounds=6, availability="static:0.3", checkpoint_every=1)
    mf.run(e, tmp_path / "whole")
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(1)
        if len(calls) > 9:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(mf.UsageError, match="No space left on device; make room"):
        mf.run(e, tmp_path / "run")
    monkeypatch.undo()
    assert not list((tmp_path / "run").glob(".*.part"))
    assert 0 < len(RunFolder(tmp_path / "run").rows()) <= 6
    history = mf.run(e, tmp_path / "run")
    assert torch.equal(history.params, read(RunFolder(tmp_path / "whole")).params)


def test_a_file_that_may_not_grow_stops_in_words(tmp_path):
    """The operating system itself refuses the bytes: a limit on file size stands in for the full disk."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    command = [sys.executable, "-m", "mimicfl", "run", "--rounds", "5", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2
    assert "could not write" in done.stderr
    assert "Traceback" not in done.stderr
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr


def test_toml_round_trip():
    settings = {"a": 1, "b": 0.1, "c": True, "d": 'say "hi"\n\t\\ \x7f é', "e": ["x", "y"], "f": None, "g": 1e-5}
    assert tomllib.loads(dumps(settings)) == {k: v for k, v in settings.items() if v is not None}


def test_nothing_is_pickled():
    """No module of the package imports pickle or lets torch or numpy use it."""
    from pathlib import Path

    files = list(Path(mf.__file__).parent.rglob("*.py"))
    assert len(files) > 100
    for file in files:
        text = file.read_text()
        for word in ("import pickle\n", "torch.load(", "torch.save(", "allow_pickle=True", "marshal", "shelve"):
            assert word not in text, (file, word)


def test_a_process_killed_while_it_began_can_go_on(tmp_path):
    """Whatever subset of its first files a killed start leaves, the same command begins again."""
    e = mf.Experiment(rounds=2)
    mf.run(e, tmp_path / "whole")
    for kept in ((), ("env.json",), ("config.toml",), ("config.toml", "env.json"), ("config.toml", "rows.jsonl")):
        folder = tmp_path / "-".join(("killed", *kept))
        folder.mkdir()
        (folder / ".config.toml.99-abcd.part").write_text("half")
        for name in kept:
            (folder / name).write_bytes((tmp_path / "whole" / name).read_bytes())
        assert torch.equal(mf.run(e, folder).params, read(RunFolder(tmp_path / "whole")).params)
        assert not list(folder.glob(".*.part"))


def test_a_finished_run_without_its_checkpoint_stays_finished(finished):
    (finished / "checkpoint.safetensors").unlink()
    before = (finished / "rows.jsonl").read_bytes()
    calls = []
    mf.run(mf.Experiment(rounds=3, availability="static:0.3"), finished, lambda *a: calls.append(a))
    assert calls == []
    assert (finished / "rows.jsonl").read_bytes() == before


def test_a_finished_run_that_lost_rows_says_so(finished):
    lines = (finished / "rows.jsonl").read_text().splitlines(keepends=True)
    (finished / "rows.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(mf.UsageError, match="2 good rows, but the run had reached round 3"):
        read(RunFolder(finished))


@pytest.mark.parametrize("row", ["[1]", "5", '{"round": 3}', '{"round": 3, "clients": "x"}'])
def test_rows_that_are_not_rows_end_the_reading(finished, row):
    with (finished / "rows.jsonl").open("a") as file:
        file.write(row + "\n")
    assert len(RunFolder(finished).rows()) == 3


def test_a_folder_in_place_of_a_file_harms_nothing(finished):
    (finished / "final.safetensors").unlink()
    (finished / "checkpoint.safetensors").unlink()
    (finished / "checkpoint.safetensors").mkdir()
    with pytest.raises(mf.UsageError, match="damaged"):
        resume(finished)
    assert len(RunFolder(finished).rows()) == 3


def test_what_the_result_depends_on_is_noticed(tmp_path, digits):
    """A stopped run does not go on silently as something else."""

    class Stop(Exception):
        pass

    def stop(row, total):
        raise Stop

    def label_smoothing(output, target):
        return torch.nn.functional.cross_entropy(output, target, label_smoothing=0.1)

    base = {**digits, "rounds": 4}
    with pytest.raises(Stop):
        mf.simulate(**base, out=tmp_path, progress=stop)
    data = digits["data"]
    scaled = mf.Data(data.x_train, data.y_train, data.x_test, data.y_test, name="digits", scale=8.0)
    tanh = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    for change in ({"loss": label_smoothing}, {"data": scaled}, {"eval_every": 2}, {"model": tanh}, {"local": mf.LocalSGD(lr=0.5)}):
        with pytest.raises(mf.UsageError, match="different run"):
            mf.simulate(**{**base, **change}, out=tmp_path)
    mf.simulate(**base, out=tmp_path)


def test_states_that_share_memory_can_be_saved(tmp_path, digits):
    from dataclasses import dataclass

    @dataclass
    class Twin(mf.State):
        previous: torch.Tensor

    class Echo(mf.FedAvg):
        def init(self, w, num_clients):
            return Twin(w, w)

    history = mf.simulate(**digits, algorithm=Echo(), rounds=2, out=tmp_path)
    assert torch.equal(history.params, mf.simulate(**digits, algorithm="fedavg", rounds=2).params)


def test_a_run_between_two_checkpoints_says_of_which_round_its_model_is(digits, tmp_path):
    def stop(row, total):
        if row["round"] == 7:
            raise KeyboardInterrupt

    given = {**digits, "availability": "static:0.3,warm_start=true", "local": mf.LocalSGD(steps=1)}
    with pytest.raises(KeyboardInterrupt):
        mf.simulate(**given, rounds=12, out=tmp_path, checkpoint_every=5, progress=stop)
    history = mf.read(tmp_path)
    assert (len(history.rows), history.params_round) == (8, 5)
    assert "params after 5 rounds" in repr(history)
    assert torch.equal(history.params, mf.simulate(**given, rounds=5).params)
    finished = mf.simulate(**given, rounds=12, out=tmp_path)
    assert finished.params_round == mf.read(tmp_path).params_round == 12
    assert "params after" not in repr(finished)


def test_runs_that_no_settings_describe_say_so(digits, tmp_path):
    mf.simulate(**digits, rounds=1, out=tmp_path)
    with pytest.raises(mf.UsageError, match="is of a run made of Python objects, which no settings describe"):
        from_dict(read_toml(tmp_path / "config.toml"))
