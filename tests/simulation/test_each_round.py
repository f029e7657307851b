"""Own measurements after every round, and an end before the last."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

import mimicfl as mf

COMMON = {"availability": "static:0.3,warm_start=true", "local": mf.LocalSGD(steps=2, lr=0.1)}


@pytest.mark.slow
def test_what_it_measures_is_in_the_rows_here_and_on_disk(digits, tmp_path):
    data = digits["data"]

    def measured(now):
        output = now.model()(data.inputs(data.x_test, torch.float32))
        assert not now.model().training
        return {"own_loss": F.cross_entropy(output, data.y_test), "norm": float(now.params.norm()), "names": ["a"]}

    given = {**digits, **COMMON, "rounds": 6}
    history = mf.simulate(**given, each_round=measured, out=tmp_path)
    assert [row["own_loss"] for row in history.rows] == pytest.approx([row["test_loss"] for row in history.rows], rel=1e-5)
    assert history.rows[-1]["norm"] == pytest.approx(float(history.params.norm()))
    assert mf.read(tmp_path).rows == history.rows
    assert "own_loss" in mf.frame(tmp_path).columns
    assert torch.equal(history.params, mf.simulate(**given).params)  # looking changes nothing


def test_what_is_undefined_is_null_and_the_row_is_a_copy(digits, tmp_path):
    def look(now):
        now.row["test_loss"] = 0
        now.row["clients"] = None
        return {"f1": float("nan"), "pair": (1, 2)}

    history = mf.simulate(**digits, **COMMON, rounds=2, each_round=look, out=tmp_path)
    assert history.rows[-1]["f1"] is None
    assert history.rows[-1]["pair"] == [1, 2]
    assert history.rows[-1]["test_loss"] > 0
    assert mf.read(tmp_path).rows == history.rows


class Spoiling(mf.callbacks.Callback):
    """Changes everything that it is given, in place."""

    part_of_result = False

    def begin(self, run):
        for row in run.rows:
            self.spoil(row)
        run.config.clear()

    def each_round(self, now):
        self.spoil(now.row)
        now.params.zero_()

    @staticmethod
    def spoil(row):
        row["clients"].clear()
        row["class_accuracy"][0] = 77.0
        row["missing"]["late"] = 5


def test_what_a_callback_changes_stays_its_own(digits, tmp_path):
    """Also the lists of a row: estimated rates and participation groups count the clients of earlier rows."""
    given = {**digits, **COMMON, "rounds": 6, "algorithm": "known-p", "participation_rates": "estimated", "select": "uniform:3"}
    clean = mf.simulate(**given)

    def stop(row, rounds):
        Spoiling.spoil(row)
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mf.simulate(**given, callbacks=[Spoiling()], progress=stop, out=tmp_path, checkpoint_every=1)
    history = mf.simulate(**given, callbacks=[Spoiling()], out=tmp_path)
    assert torch.equal(history.params, clean.params)
    assert history.config["algorithm"] == "known-p"
    for a, b in zip(history.rows, clean.rows, strict=True):
        assert {key: value for key, value in a.items() if key != "seconds"} == {key: value for key, value in b.items() if key != "seconds"}


def stop_at(last):
    return lambda now: now.stop() if now.row["round"] == last else None


def test_a_callback_can_stop_the_run(digits, tmp_path):
    given = {**digits, **COMMON, "rounds": 9, "eval_every": 5}
    history = mf.simulate(**given, each_round=stop_at(3), out=tmp_path)
    assert len(history.rows) == 4
    assert history.rows[-1]["test_accuracy"] is not None  # tested, though its turn was not yet
    assert torch.equal(history.params, mf.simulate(**{**given, "rounds": 4}).params)
    again = mf.simulate(**given, out=tmp_path)  # it is finished
    assert torch.equal(again.params, history.params)


def test_a_stopped_run_that_was_killed_before_its_result_ends_there(digits, tmp_path):
    given = {**digits, **COMMON, "rounds": 9}
    history = mf.simulate(**given, each_round=stop_at(3), out=tmp_path)
    (tmp_path / "final.safetensors").unlink()
    again = mf.simulate(**given, out=tmp_path)
    assert torch.equal(again.params, history.params)
    assert len(again.rows) == 4


def test_with_settings_and_patience(tmp_path):
    best = {"loss": float("inf")}

    def patient(now):
        if now.row["test_loss"] < best["loss"]:
            best.update(loss=now.row["test_loss"], params=now.params, round=now.row["round"])
        elif now.row["round"] - best["round"] >= 3:
            now.stop()

    e = mf.Experiment(rounds=200, availability="static:0.1", lr=1.0)
    history = mf.run(e, tmp_path, each_round=patient)
    assert len(history.rows) == best["round"] + 4 < 200
    assert torch.equal(best["params"], mf.run(dataclasses.replace(e, rounds=best["round"] + 1)).params)


def test_buffers_are_those_of_the_round(digits):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 10))
    seen = []
    with pytest.warns(UserWarning, match="BatchNorm"):
        history = mf.simulate(**{**digits, "model": model}, **COMMON, rounds=2, each_round=lambda now: seen.append(now.model()))
    assert not torch.equal(seen[0][2].running_mean, seen[1][2].running_mean)
    assert torch.equal(seen[1][2].running_mean, history.model()[2].running_mean)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (lambda now: False, r"dict .* got False.*\.stop\(\)"),
        (lambda now: {"test_loss": 1}, "'test_loss', which is already a column"),
        (lambda now: {"stopped": 1}, "'stopped', which is already a column"),
        (lambda now: {"run": 1}, "'run', which is already a column"),
        (lambda now: {"x": [float("nan")]}, "numbers, strings or lists"),
        (5, "each_round must be a function"),
        (lambda now: {"model": now}, "numbers, strings or lists"),
    ],
)
def test_mistakes(digits, found, words):
    with pytest.raises(mf.UsageError, match=words):
        mf.simulate(**digits, **COMMON, rounds=2, each_round=found)
