"""Callbacks and trackers on Flower: called as in the simulator, and resumed runs send no round twice."""

import csv
from dataclasses import dataclass, field

import pytest
import torch
from flwr.app import MetricRecord

import mimicfl as mf
import mimicfl.flower as mff
from mimicfl.errors import UsageError
from tests.flower.problems import LOCAL, N, app, problem
from tests.flower.toy import Toy, run

BASE = {"fraction_evaluate": 0.0, "lr": 0.3, "wait_for": 3}


@dataclass
class Remembering(mf.callbacks.Tracker):
    """A tracker that keeps what it is sent, as a server would."""

    kept: list = field(default_factory=list)
    ends: list = field(default_factory=list)

    def connect(self, run, run_id):
        self.kept.append(("begin", run_id))
        return sum(kind == "row" for kind, _ in self.kept)

    def log(self, rows):
        self.kept.extend(("row", row["round"]) for row in rows)

    def close(self, finished):
        self.ends.append(finished)


def test_a_resumed_run_sends_every_round_once(tmp_path):
    """The server dies in round 4, after a checkpoint of round 3: rounds are repeated, but not sent again."""
    tracker = Remembering()

    def dies(server_round, arrays):
        if server_round == 5 and not tracker.ends:
            raise KeyboardInterrupt
        return MetricRecord({"accuracy": 0.1 * server_round})

    with pytest.raises(KeyboardInterrupt):
        run(mff.MimiC(callbacks=[tracker], folder=tmp_path, save_every=3, **BASE), Toy(), rounds=7, evaluate_fn=dies)
    assert tracker.ends == [False]
    run(mff.MimiC(callbacks=[tracker], folder=tmp_path, save_every=3, **BASE), Toy(), rounds=7, evaluate_fn=dies)
    assert [number for kind, number in tracker.kept if kind == "row"] == list(range(7))
    assert len({name for kind, name in tracker.kept if kind == "begin"}) == 1  # the same run in the tracker
    assert tracker.ends == [False, True]


def test_callbacks_add_columns_and_stop_the_run(tmp_path):
    seen = []

    def measure(now):
        seen.append(now.params.clone())
        if now.row["round"] == 2:
            now.stop()
        return {"largest": float(now.params.max())}

    strategy = mff.MimiC(callbacks=[measure, mf.callbacks.CSV(tmp_path / "csv")], folder=tmp_path / "run", **BASE)
    run(strategy, Toy(), rounds=9)
    assert [row["largest"] for row in strategy.rows] == [float(w.max()) for w in seen]
    assert [bool(row.get("stopped")) for row in strategy.rows] == [False, False, True]
    assert torch.equal(seen[-1], strategy.form.w)
    with next((tmp_path / "csv").iterdir()).open() as file:
        assert [row["round"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    again = mff.MimiC(callbacks=[measure], folder=tmp_path / "run", **BASE)
    run(again, Toy(), rounds=9)
    assert len(again.rows) == 3  # a run that was stopped stays stopped


def test_early_stopping_counts_on_after_a_restart(tmp_path):
    evaluate = {"evaluate_fn": lambda t, arrays: MetricRecord({"accuracy": min(t, 2) / 10})}
    for rounds in (3, 20):
        strategy = mff.MimiC(callbacks=[mf.callbacks.EarlyStopping(patience=4)], folder=tmp_path, **BASE)
        run(strategy, Toy(), rounds=rounds, **evaluate)
    assert len(strategy.rows) == 6  # the best round is the second


def test_the_module_is_there_if_server_app_made_it(tmp_path):
    found = []
    data, _, _ = problem()
    model = {"model": lambda: problem()[2], "test": lambda: data, "loss": data.loss}
    watch = [lambda now: found.append((now.params, torch.cat([p.detach().view(-1) for p in now.model().parameters()])))]
    options = {"num_rounds": 1, "wait_for": N, "lr": LOCAL.lr, "track": f"csv:{tmp_path}", "callbacks": watch}
    mff.simulate(mff.server_app(**model, **options), app(), N)
    assert torch.equal(*found[0])
    assert list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="model class"):
        run(mff.MimiC(callbacks=[lambda now: now.model()], **BASE), Toy(), rounds=1)


def test_what_is_no_callback_is_refused():
    with pytest.raises(UsageError, match="callbacks must be a list"):
        mff.MimiC(callbacks=mf.callbacks.EarlyStopping())
    with pytest.raises(UsageError, match="a callback must be"):
        mff.MimiC(callbacks=[3])
