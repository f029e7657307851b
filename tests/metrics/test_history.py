"""`History.time_to`: what it costs to reach a target, censored if the run ends before."""

import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.metrics.history import History
from mimicfl.tasks.metrics import higher_is_better


def history(directions=None, **columns):
    rows = [
        {"round": t, "clients": [], "uploads": 2 * t, "bytes_up": 100 * t, "virtual_seconds": 10.0 + t}
        | {name: values[t] for name, values in columns.items()}
        for t in range(len(next(iter(columns.values()))))
    ]
    return History(rows, torch.empty(0), 1, directions=directions or {})


def test_rising_metrics_are_reached_from_below():
    found = history(test_accuracy=[0.2, None, 0.5, 0.4, 0.9])
    assert found.time_to("test_accuracy", 0.5) == 12.0  # the first time, and exactly reaching it counts
    assert found.time_to("test_accuracy", 0.45, against="round") == 2
    assert found.time_to("test_accuracy", 0.6, against="uploads") == 8
    assert found.time_to("test_accuracy", 0.6, against="bytes_up") == 400
    assert found.time_to("test_accuracy", 0.95) is None  # censored


@pytest.mark.parametrize("column", ["test_loss", "train_loss", "distance", "test_perplexity", "test_rmse", "clients_spread"])
def test_falling_metrics_are_reached_from_above(column):
    found = history(**{column: [9.0, None, 4.0, 5.0, 1.0]})
    assert found.time_to(column, 4.0) == 12.0
    assert found.time_to(column, 3.9) == 14.0
    assert found.time_to(column, 0.5) is None


def test_unknown_columns_are_named():
    with pytest.raises(mf.UsageError, match="test_accuracy"):
        history(test_accuracy=[0.1]).time_to("test_acuracy", 0.5)
    with pytest.raises(mf.UsageError, match="hours"):
        history(test_accuracy=[0.1]).time_to("test_accuracy", 0.5, against="hours")
    with pytest.raises(mf.UsageError, match="no value in round 1"):
        history(train_loss=[9.0, 1.0], test_loss=[0.1, None]).time_to("train_loss", 1.0, against="test_loss")


def test_by_name():
    assert all(map(higher_is_better, ("test_accuracy", "test_auroc", "test_macro_f1", "clients_worst_tenth", "f1")))
    assert not any(map(higher_is_better, ("test_rmse", "test_perplexity", "mean_error", "distance")))


@pytest.mark.parametrize("falls", [True, False])
def test_a_custom_metric_says_its_direction_in_memory_on_disk_and_to_callbacks(tmp_path, falls):
    x = torch.randn(12, 2, dtype=torch.float64)
    off = mf.tasks.Metric("off", lambda output, target: (output - target).abs().sum(dim=1), higher_is_better=not falls)
    given = {"task": mf.tasks.Regression(), "metrics": [off], "split": [[0, 1, 2], [3, 4, 5]], "test_split": [[0], [1]], "rounds": 6}
    best = mf.callbacks.BestModel("test_off")
    stopping = mf.callbacks.EarlyStopping("clients_mean", patience=2)  # the value falls in every round
    model, data = nn.Linear(2, 1).double(), mf.Data(x, x[:, :1], x, x[:, :1])
    ours = mf.simulate(model, data, **given, local=mf.LocalSGD(steps=3, lr=0.1), out=tmp_path, callbacks=[best, stopping])
    values = [row["test_off"] for row in ours.rows]
    assert values == sorted(values, reverse=True)
    assert len(values) == (6 if falls else 3)
    assert best.found[""].round == (5 if falls else 0)
    for found in (ours, mf.read(tmp_path)):
        assert found.time_to("test_off", values[1], against="round") == (1 if falls else 0)
        assert found.directions["clients_worst_tenth"] is not falls


def test_the_curve_is_that_of_the_main_metric():
    rows = [{"uploads": 1, "clients": [], "test_accuracy": None, "test_loss": 2.0, "test_rmse": 1.5}]
    assert mf.History(rows, torch.empty(0), 1, config={"metrics": "rmse"}).curve() == ("test_rmse", [1], [1.5])
    rows.append({"uploads": 2, "clients": [], "test_accuracy": None, "test_loss": None})  # not evaluated, as in interrupted runs
    assert mf.History(rows, torch.empty(0), 1, config={"metrics": "rmse"}).curve() == ("test_rmse", [1], [1.5])
    assert mf.History(rows, torch.empty(0), 1).curve() == ("test_loss", [1], [2.0])
