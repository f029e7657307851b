"""A finished run is extended: its first rounds stay, and it ends like a run of that length."""

import dataclasses
import os

import pytest
import torch

import mimicfl as mf
from tests.conftest import resume


class TestLonger:
    """The same run with more rounds, or uploads, continues where it ended."""

    @pytest.mark.slow
    @pytest.mark.parametrize("algorithm", ["mimic", "fedau"])
    @pytest.mark.parametrize("pattern", ["bounded:5", "time-varying:0.2", "markov:0.2,0.5"])
    def test_ends_as_one_that_was_long_from_the_start(self, tmp_path, algorithm, pattern):
        e = mf.Experiment(algorithm=algorithm, availability=pattern, rounds=5, num_clients=10)
        mf.run(e, tmp_path / "run")
        longer = dataclasses.replace(e, rounds=12)
        found = mf.run(longer, tmp_path / "run")
        whole = mf.run(longer)
        assert torch.equal(found.params, whole.params)
        assert [row["round"] for row in found.rows] == list(range(12))
        read = mf.read(tmp_path / "run")
        assert (len(read.rows), read.config["rounds"]) == (12, 12)
        with pytest.raises(mf.UsageError, match="rounds is 12 there and 5 here"):
            mf.run(e, tmp_path / "run")

    @pytest.mark.slow
    def test_by_uploads_and_with_objects(self, tmp_path, digits):
        given = {**digits, "algorithm": "scaffold", "availability": "static:0.2", "local": mf.LocalSGD(steps=2)}
        mf.simulate(**given, uploads=8, out=tmp_path)
        found = mf.simulate(**given, uploads=20, out=tmp_path)
        assert torch.equal(found.params, mf.simulate(**given, uploads=20).params)
        assert found.rows[-1]["uploads"] == 20

    @pytest.mark.slow
    def test_killed_while_it_was_extended(self, tmp_path):
        """The settings are written, the old result is still there."""
        e = mf.Experiment(rounds=4, num_clients=10)
        mf.run(e, tmp_path)
        longer = dataclasses.replace(e, rounds=8)
        text = (tmp_path / "config.toml").read_text()
        (tmp_path / "config.toml").write_text(text.replace("rounds = 4", "rounds = 8"))
        assert torch.equal(mf.run(longer, tmp_path).params, mf.run(longer).params)

    def test_a_different_run_is_not_extended(self, tmp_path, digits):
        given = {**digits, "availability": "static:0.2", "local": mf.LocalSGD(steps=2)}
        mf.simulate(**given, rounds=3, out=tmp_path)
        before = (tmp_path / "config.toml").read_text(), (tmp_path / "final.safetensors").read_bytes()
        with pytest.raises(mf.UsageError, match=r"partition is|split differs"):
            mf.simulate(**{**given, "split": digits["split"][::-1]}, rounds=6, out=tmp_path)
        with pytest.raises(mf.UsageError, match="holds a different run"):
            mf.simulate(**given, algorithm="fedavg", rounds=6, out=tmp_path)
        assert before == ((tmp_path / "config.toml").read_text(), (tmp_path / "final.safetensors").read_bytes())

    def test_without_a_checkpoint_it_says_so(self, tmp_path):
        e = mf.Experiment(rounds=3, num_clients=10)
        mf.run(e, tmp_path)
        (tmp_path / "checkpoint.safetensors").unlink()
        with pytest.raises(mf.UsageError, match="finished after 3 rounds and has no checkpoint"):
            mf.run(dataclasses.replace(e, rounds=6), tmp_path)

    @pytest.mark.slow
    def test_stopped_and_diagnosed_runs_cannot_be_extended(self, tmp_path):
        e = mf.Experiment(rounds=6, num_clients=10)

        def third(now):
            return now.stop() if now.row["round"] == 2 else None

        mf.run(e, tmp_path / "ended", each_round=third)
        with pytest.raises(mf.UsageError, match="stopped by its callback after 3 rounds"):
            mf.run(dataclasses.replace(e, rounds=9), tmp_path / "ended", each_round=third)
        mf.run(dataclasses.replace(e, diagnose="every=2"), tmp_path / "diagnosed")
        with pytest.raises(mf.UsageError, match="cannot be extended"):
            mf.run(dataclasses.replace(e, rounds=9, diagnose="every=2"), tmp_path / "diagnosed")

    def test_a_checkpoint_that_does_not_fit_is_left_unchanged(self, tmp_path, digits, monkeypatch):
        @dataclasses.dataclass
        class More(mf.State):
            z: torch.Tensor

        class Mine(mf.FedAvg):
            def init(self, w, num_clients):
                return More(w, torch.zeros(int(os.environ["SIZE"])))

        given = {**digits, "algorithm": Mine(), "local": mf.LocalSGD(steps=1), "out": tmp_path}
        monkeypatch.setenv("SIZE", "2")
        mf.simulate(**given, rounds=3)
        monkeypatch.setenv("SIZE", "3")
        with pytest.raises(mf.UsageError, match="does not fit this version"):
            mf.simulate(**given, rounds=6)
        assert len(mf.simulate(**given, rounds=3).rows) == 3  # the result is still there

    @pytest.mark.slow
    def test_a_corrected_call_may_be_longer(self, tmp_path):
        def fail(now):
            raise KeyError("a slip")

        def stop(e, row, total):
            if row["round"] == 3:
                raise KeyboardInterrupt

        e = mf.Experiment(rounds=4, num_clients=10)
        with pytest.raises(KeyError):
            mf.run(e, tmp_path, each_round=fail)
        longer = dataclasses.replace(e, rounds=8, checkpoint_every=1)
        with pytest.raises(KeyboardInterrupt):
            mf.run(longer, tmp_path, stop)
        assert torch.equal(resume(tmp_path).params, mf.run(longer).params)
