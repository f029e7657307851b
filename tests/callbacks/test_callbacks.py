"""Callbacks in simulate, run, compare and sweep: early stopping, the best model, and the fingerprint."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

import mimicfl as mf
from mimicfl.callbacks.stopping import improves
from mimicfl.tasks.metrics import higher_is_better

SHORT = mf.Experiment(rounds=6, epochs=1, num_clients=4, availability="static:0.5", lr=0.5)


@dataclasses.dataclass
class Recording(mf.callbacks.Callback):
    """Notes what it was told, by run."""

    seen: dict = dataclasses.field(default_factory=dict)

    def begin(self, run):
        self.run = run
        self.seen[run.name] = [f"{len(run.rows)} of {run.rounds}"]

    def each_round(self, now):
        assert now.run is self.run
        self.seen[self.run.name].append(now.row["round"])
        return {"double": 2 * now.row["round"]}

    def end(self, finished):
        self.seen[self.run.name].append(finished)


@pytest.mark.slow
def test_every_run_of_a_comparison_has_its_own_copy():
    told = Recording()
    found = mf.compare(SHORT, ["fedavg", "mimic"], [0, 1], callbacks=[told])
    assert told.seen == {f"{a}-s{s}": ["0 of 6", *range(6), True] for a in ("fedavg", "mimic") for s in (0, 1)}
    assert [row["double"] for row in found["mimic"][1].rows] == [0, 2, 4, 6, 8, 10]
    assert not hasattr(told, "run")


def test_in_a_sweep(tmp_path):
    (tmp_path / "grid.toml").write_text(
        'rounds = 9\nepochs = 1\nnum_clients = 4\navailability = "always"\n[grid]\nalgorithm = ["fedavg", "mimic"]\nlr = [0.1, 0.2]\n'
    )
    told = Recording()
    found = mf.sweep(tmp_path / "grid.toml", tmp_path / "out", callbacks=[told], rounds=2, lr=0.1)
    assert set(found) == set(told.seen) == {"fedavg-s0", "mimic-s0"}
    assert len(found["mimic-s0"].rows) == 2


def test_functions_and_objects_together_in_order():
    def first(now):
        return {"own": float(now.row["round"] % 2)}

    history = mf.run(SHORT, callbacks=[first, mf.callbacks.EarlyStopping("own", patience=2, mode="max")])
    assert [row["own"] for row in history.rows] == [0.0, 1.0, 0.0, 1.0]  # best in round 1, none better in 2 and 3
    assert history.rows[-1]["stopped"]


class TestEarlyStopping:
    @pytest.mark.slow
    def test_stops_when_nothing_improves_and_resumes_where_it_counted(self, tmp_path):
        stopping = mf.callbacks.EarlyStopping("test_loss", patience=3)
        e = dataclasses.replace(SHORT, rounds=60, lr=2.0)
        whole = mf.run(e, callbacks=[stopping])
        losses = [row["test_loss"] for row in whole.rows]
        assert len(losses) < 60
        assert min(losses) == losses[-4] < min(losses[-3:])

        def progress(experiment, row, total):
            if row["round"] == len(losses) - 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            mf.run(e, tmp_path, progress=progress, callbacks=[stopping])
        again = mf.run(e, tmp_path, callbacks=[mf.callbacks.EarlyStopping("test_loss", patience=3)])
        assert torch.equal(again.params, whole.params)
        assert len(again.rows) == len(losses)

    @pytest.mark.parametrize("patience", [1, 2, 5])
    def test_rounds_without_a_value_do_not_stop_a_run(self, patience):
        """The metric rises until round 8 and falls then; it is measured in rounds 2, 5, 8, ..."""

        def measured(now):
            return {"own": 10.0 - abs(now.row["round"] - 8)} if now.row["round"] % 3 == 2 else {"own": None}

        stopping = mf.callbacks.EarlyStopping("own", patience=patience, mode="max")
        rows = mf.run(dataclasses.replace(SHORT, rounds=20), callbacks=[measured, stopping]).rows
        assert rows[-1]["round"] == (11 if patience <= 3 else 14)

    def test_a_patience_below_the_evaluation_interval(self):
        e = dataclasses.replace(SHORT, rounds=9, eval_every=3)
        rows = mf.run(e, callbacks=[mf.callbacks.EarlyStopping("test_loss", patience=1, mode="max")]).rows
        assert [row["round"] for row in rows if row["test_loss"] is not None][:2] == [2, 5]

    def test_its_settings_are_part_of_the_fingerprint(self, tmp_path):
        mf.run(SHORT, tmp_path, callbacks=[mf.callbacks.EarlyStopping(patience=2)])
        with pytest.raises(mf.UsageError, match="callback"):
            mf.run(SHORT, tmp_path, callbacks=[mf.callbacks.EarlyStopping(patience=3)])

    @pytest.mark.parametrize("given", [{"patience": 0}, {"mode": "up"}, {"min_delta": -1}])
    def test_mistakes(self, given):
        with pytest.raises(mf.UsageError, match=next(iter(given))):
            mf.callbacks.EarlyStopping(**given)

    def test_an_unknown_metric(self):
        with pytest.raises(mf.UsageError, match="f1"):
            mf.run(SHORT, callbacks=[mf.callbacks.EarlyStopping("f1")])


@pytest.mark.slow
def test_the_best_model(tmp_path):
    best = mf.callbacks.BestModel()
    found = mf.compare(dataclasses.replace(SHORT, lr=2.0), ["fedavg", "mimic"], [0], tmp_path, callbacks=[best])
    for name, [history] in found.items():
        values = [row["test_accuracy"] for row in history.rows]
        kept = best.found[f"{name}-s0"]
        assert kept.value == max(values)
        assert kept.round == values.index(max(values))
        assert torch.equal(load_file(tmp_path / f"{name}-s0" / "best.safetensors")["params"], kept.params)
    assert any(best.found[f"{name}-s0"].round < 5 for name in found)  # not simply the last one
    shorter = mf.run(dataclasses.replace(SHORT, lr=2.0, algorithm="mimic", rounds=best.found["mimic-s0"].round + 1))
    assert torch.equal(shorter.params, best.found["mimic-s0"].params)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3, 8])  # the best round before the checkpoint, and after it
def test_the_best_model_of_a_run_that_resumes(tmp_path, rounds):
    e = dataclasses.replace(SHORT, rounds=8, checkpoint_every=2)

    def own(now):
        return {"own": float(-abs(now.row["round"] - rounds + 2))}

    whole = mf.callbacks.BestModel("own")
    mf.run(e, callbacks=[own, whole])

    def progress(experiment, row, total):
        if row["round"] == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mf.run(e, tmp_path, progress=progress, callbacks=[own, mf.callbacks.BestModel("own")])
    again = mf.callbacks.BestModel("own")
    mf.run(e, tmp_path, callbacks=[own, again])
    assert again.found[""].round == whole.found[""].round == rounds - 2
    assert torch.equal(again.found[""].params, whole.found[""].params)
    assert torch.equal(load_file(tmp_path / "best.safetensors")["params"], whole.found[""].params)


@pytest.mark.parametrize("callback", [mf.callbacks.BestModel(), mf.callbacks.EarlyStopping(patience=2)])
def test_a_task_without_accuracy(callback):
    with pytest.raises(mf.UsageError, match="test_macro_f1"):
        mf.run(dataclasses.replace(SHORT, task="classification", metrics="macro-f1"), callbacks=[callback])


def test_smaller_errors_are_better():
    assert improves(higher_is_better("test_rmse"), 1.0, 2.0)
    assert improves(higher_is_better("test_accuracy"), 2.0, 1.0)


@pytest.mark.slow
def test_who_only_watches_is_not_part_of_the_fingerprint(tmp_path):
    plain = mf.run(SHORT, tmp_path)
    again = mf.run(SHORT, tmp_path, callbacks=[mf.callbacks.CSV(tmp_path / "csv"), mf.callbacks.BestModel()])
    assert again.rows == plain.rows
    assert mf.run(SHORT, callbacks=[mf.callbacks.BestModel()]).fingerprint == plain.fingerprint


@pytest.mark.slow
def test_a_function_has_the_same_fingerprint_as_each_round():
    def own(now):
        return None

    assert mf.run(SHORT, callbacks=[own]).fingerprint == mf.run(SHORT, each_round=own).fingerprint


@pytest.mark.parametrize("given", [5, "tensorboard", mf.callbacks.BestModel(), [5], [mf.callbacks.EarlyStopping], lambda now: None])
def test_mistakes(given):
    with pytest.raises(mf.UsageError, match="callback"):
        mf.run(SHORT, callbacks=given)
