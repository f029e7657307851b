"""The run folder: its files, what is read back from them, and which runs may not use it."""

import json
import tomllib

import pytest
import torch

import mimicfl as mf
from mimicfl.metrics.history import read
from mimicfl.metrics.store import RunFolder, find_runs
from mimicfl.settings import from_dict, read_toml
from mimicfl.toml import dumps
from tests.conftest import resume


def test_files_of_a_run_folder(finished):
    names = {p.name for p in finished.iterdir() if not p.name.startswith(".")}
    assert names == {"config.toml", "rows.jsonl", "checkpoint.safetensors", "final.safetensors", "env.json"}
    settings = tomllib.loads((finished / "config.toml").read_text())
    assert settings["model"] == "mlp"  # "auto" is resolved, so a later default cannot change this run
    assert json.loads((finished / "env.json").read_text())["torch"] == torch.__version__
    assert len((finished / "rows.jsonl").read_text().splitlines()) == 3


def test_a_run_resumed_elsewhere_records_both_environments(finished):
    (finished / "final.safetensors").unlink()
    made = json.loads((finished / "env.json").read_text())
    (finished / "env.json").write_text(json.dumps(made | {"torch": "1.0", "started": "long ago"}))
    for _ in range(2):
        mf.run(mf.Experiment(rounds=3, availability="static:0.3"), finished)  # the second call has nothing to do
    assert json.loads((finished / "env.json").read_text()) == made | {"torch": f"1.0, then {torch.__version__}", "started": "long ago"}


@pytest.mark.slow
def test_read_returns_the_same_history(finished):
    history, again = mf.run(mf.Experiment(rounds=3, availability="static:0.3")), read(RunFolder(finished))
    assert torch.equal(history.params, again.params)
    assert history.client_accuracy == again.client_accuracy
    assert (history.class_counts == again.class_counts).all()
    assert (history.active == again.active).all()


@pytest.mark.slow
def test_read_restores_the_model(finished, tmp_path):
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
    with pytest.raises(ValueError, match=r"history\.params"):
        mf.read(tmp_path / "python").model()


@pytest.mark.slow
def test_runs_as_a_data_frame(tmp_path):
    mf.compare(mf.Experiment(rounds=2, epochs=1), ["fedavg", "mimic"], [0, 1], tmp_path / "a")
    mf.run(mf.Experiment(rounds=2, epochs=1, lr=0.5, seed=1), tmp_path / "b")
    frame = mf.frame(tmp_path / "a", tmp_path / "b")
    assert len(frame) == 10
    assert list(frame.columns[:6]) == ["run", "algorithm", "availability", "seed", "lr", "round"]
    ends = frame[frame["round"] == 1].groupby(["algorithm", "lr"])["test_accuracy"].count()
    assert ends.to_dict() == {("fedavg", "geometric:0.1,0.99"): 2, ("mimic", "geometric:0.1,0.99"): 2, ("mimic", 0.5): 1}


def test_a_folder_with_other_files_is_refused_and_unchanged(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(mf.UsageError, match=r"not a run folder.*thesis\.tex"):
        mf.run(mf.Experiment(rounds=2), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"
    with pytest.raises(mf.UsageError, match="is not a run folder"):
        resume(tmp_path)
    with pytest.raises(mf.UsageError, match="holds no run"):
        find_runs([tmp_path])
    with pytest.raises(mf.UsageError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])


def test_a_different_experiment_does_not_overwrite_a_run(finished):
    before = (finished / "rows.jsonl").read_bytes()
    with pytest.raises(mf.UsageError, match=r"different run \(algorithm.*'mimic'.*'fedavg'"):
        mf.run(mf.Experiment(rounds=3, availability="static:0.3", algorithm="fedavg"), finished)
    assert (finished / "rows.jsonl").read_bytes() == before


def test_toml_round_trip():
    settings = {"a": 1, "b": 0.1, "c": True, "d": 'say "hi"\n\t\\ \x7f é', "e": ["x", "y"], "f": None, "g": 1e-5}
    assert tomllib.loads(dumps(settings)) == {k: v for k, v in settings.items() if v is not None}


def test_no_module_uses_pickle():
    """No module of the package imports pickle or lets torch or numpy use it."""
    from pathlib import Path

    files = list(Path(mf.__file__).parent.rglob("*.py"))
    assert len(files) > 100
    for file in files:
        text = file.read_text()
        for word in ("import pickle\n", "torch.load(", "torch.save(", "allow_pickle=True", "marshal", "shelve"):
            assert word not in text, (file, word)


@pytest.mark.slow
def test_a_run_killed_at_its_start_can_be_started_again(tmp_path):
    """Whichever of its first files a killed process leaves, the same command starts the run."""
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


@pytest.mark.slow
def test_a_finished_run_without_its_checkpoint_stays_finished(finished):
    (finished / "checkpoint.safetensors").unlink()
    before = (finished / "rows.jsonl").read_bytes()
    calls = []
    mf.run(mf.Experiment(rounds=3, availability="static:0.3"), finished, lambda *a: calls.append(a))
    assert calls == []
    assert (finished / "rows.jsonl").read_bytes() == before


@pytest.mark.slow
def test_resuming_with_different_parts_is_refused(tmp_path, digits):
    """An interrupted run cannot be resumed with different parts."""

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


@pytest.mark.slow
def test_states_that_share_tensors_can_be_saved(tmp_path, digits):
    from dataclasses import dataclass

    @dataclass
    class Twin(mf.State):
        previous: torch.Tensor

    class Echo(mf.FedAvg):
        def init(self, w, num_clients):
            return Twin(w, w)

    history = mf.simulate(**digits, algorithm=Echo(), rounds=2, out=tmp_path)
    assert torch.equal(history.params, mf.simulate(**digits, algorithm="fedavg", rounds=2).params)


@pytest.mark.slow
def test_an_unfinished_run_reports_the_round_of_its_parameters(digits, tmp_path):
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


def test_settings_of_runs_from_python_objects_are_refused(digits, tmp_path):
    mf.simulate(**digits, rounds=1, out=tmp_path)
    with pytest.raises(mf.UsageError, match="Python objects"):
        from_dict(read_toml(tmp_path / "config.toml"))
