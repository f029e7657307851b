"""The round loop: counting, stopping, buffers, and mistakes told in words."""

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf


@pytest.mark.slow
def test_public_names():
    """The call as it stands in the README."""
    data = mf.datasets.load("digits")
    split = mf.partition.shards(data.y_train, num_clients=30, shards_per_client=2, seed=0)
    model = mf.models.build("mlp:32", data, seed=0)
    start = [p.clone() for p in model.parameters()]
    history = mf.simulate(
        model=model,
        data=data,
        split=split,
        algorithm=mf.MimiC(),
        availability=mf.availability.TimeVarying(0.1),
        rounds=12,
        local=mf.LocalSGD(epochs=5, batch_size=16, lr=mf.lr.geometric(0.1, 0.95)),
        global_lr="local",
        update="sum",
        seed=0,
        device="cpu",
    )
    assert len(history.rows) == 12
    row = history.rows[-1]
    assert {"round", "active", "empty", "uploads", "bytes_up", "bytes_down", "test_accuracy", "test_loss", "seconds"} <= row.keys()
    assert row["round"] == 11
    assert row["active"] == 3
    assert row["test_accuracy"] > 0.2
    assert history.params.ndim == 1
    assert all(torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))  # the given model is left alone
    trained = history.model()
    assert torch.equal(torch.cat([p.reshape(-1) for p in trained.parameters()]).detach(), history.params)
    with torch.no_grad():
        hits = trained(data.inputs(data.x_test, torch.float32)).argmax(1) == data.y_test
    assert hits.double().mean().item() == pytest.approx(row["test_accuracy"])
    frame = history.to_pandas()
    assert frame.loc[11, "test_accuracy"] == row["test_accuracy"]
    assert history.plot().axes
    np.testing.assert_array_equal(history.active, mf.availability.schedule(mf.availability.TimeVarying(0.1), 12, 30, 0))


def test_training_starts_from_the_given_parameters(quadratic):
    with torch.no_grad():
        next(quadratic["model"].parameters()).copy_(quadratic["data"].optimum[None])
    history = mf.simulate(**quadratic, algorithm="fedavg", rounds=1, local=mf.LocalSGD(steps=1, batch_size=None, lr=0.01))
    assert history.rows[0]["distance"] < 1e-10


@pytest.mark.slow
def test_learning_happens(digits):
    history = mf.simulate(**digits, algorithm="fedavg", rounds=15, local=mf.LocalSGD(epochs=5, lr=0.1))
    assert history.rows[-1]["test_accuracy"] > 0.85
    assert history.rows[-1]["train_loss"] < history.rows[0]["train_loss"]
    assert len(history.client_accuracy) == 30
    assert len(history.rows[-1]["class_accuracy"]) == 10
    assert np.mean(history.rows[-1]["class_accuracy"]) == pytest.approx(history.rows[-1]["test_accuracy"], abs=0.02)


class TestCounting:
    schedule = np.array([[1, 1, 0, 0, 1, 0], [0] * 6, [0, 0, 1, 0, 0, 0], [1] * 6], bool)

    @pytest.mark.parametrize(
        ("algorithm", "up", "down"),
        [("fedavg", 1, 1), ("fedprox", 1, 1), ("mifa", 1, 1), ("mimic", 1, 1), ("scaffold", 1, 2), ("scaffold:uploads=2", 2, 2)],
    )
    def test_vectors_and_bytes(self, quadratic, algorithm, up, down):
        history = mf.simulate(**quadratic, algorithm=algorithm, availability=mf.availability.Explicit(self.schedule))
        updates = np.cumsum(self.schedule.sum(axis=1))
        rows = history.rows
        assert [r["uploads"] for r in rows] == [up, up, 2 * up, 3 * up]
        for way, vectors in (("up", up), ("down", down)):
            assert [r[f"vectors_{way}"] for r in rows] == (updates * vectors).tolist()
            assert [r[f"bytes_{way}"] for r in rows] == (updates * vectors * 5 * 8).tolist()

    def test_empty_rounds(self, quadratic):
        history = mf.simulate(**quadratic, algorithm="mimic", availability=mf.availability.Explicit(self.schedule))
        assert [r["empty"] for r in history.rows] == [False, True, False, False]
        assert [r["active"] for r in history.rows] == [3, 0, 1, 6]
        assert history.rows[1]["test_loss"] == history.rows[0]["test_loss"]
        assert history.rows[1]["train_loss"] is None
        assert history.rows[1]["distance"] == history.rows[0]["distance"]

    def test_rates_advance_in_empty_rounds(self, quadratic):
        history = mf.simulate(
            **quadratic, algorithm="mimic", availability=mf.availability.Explicit(self.schedule), local=mf.LocalSGD(lr="geometric:0.1,0.5")
        )
        assert [r["global_lr"] for r in history.rows] == [0.1, None, 0.025, 0.0125]

    @pytest.mark.parametrize(("algorithm", "rounds"), [("mimic", 10), ("scaffold", 10), ("scaffold:uploads=2", 5)])
    def test_uploads_stop_a_run(self, quadratic, algorithm, rounds):
        history = mf.simulate(**quadratic, algorithm=algorithm, uploads=10)
        assert len(history.rows) == rounds
        assert history.rows[-1]["uploads"] == 10

    def test_empty_rounds_cost_no_uploads(self, quadratic):
        history = mf.simulate(**quadratic, algorithm="mimic", availability="static:0.1", uploads=8, seed=3)
        assert history.rows[-1]["uploads"] == 8
        assert not history.rows[-1]["empty"]
        assert len(history.rows) > 8

    def test_the_first_limit_counts(self, quadratic):
        assert len(mf.simulate(**quadratic, rounds=3, uploads=100).rows) == 3
        assert len(mf.simulate(**quadratic, rounds=30, uploads=4).rows) == 4

    def test_an_odd_budget_is_never_overdrawn(self, quadratic):
        assert mf.simulate(**quadratic, algorithm="scaffold:uploads=2", uploads=7).rows[-1]["uploads"] == 6


def test_the_theory_rate_sees_the_active_clients(quadratic):
    schedule = np.array([[1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]], bool)
    history = mf.simulate(
        **quadratic, availability=mf.availability.Explicit(schedule), local=mf.LocalSGD(lr=0.01), global_lr=mf.lr.theory(0.1, 10)
    )
    assert [r["global_lr"] for r in history.rows] == pytest.approx([0.1 * 3 / 10, 0.1 / 11])


class TestBuffers:
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))

    def test_running_statistics_are_averaged_and_kept(self, digits):
        with pytest.warns(UserWarning, match="GroupNorm"):
            history = mf.simulate(
                self.model(), digits["data"], digits["split"][:2], algorithm="mimic", rounds=1, local=mf.LocalSGD(steps=2)
            )
        trained = history.model()
        assert int(trained[2].num_batches_tracked) == 2
        assert trained[2].running_mean.abs().sum() > 0

    def test_they_are_averaged_over_the_active_clients(self, digits):
        model = self.model()
        runs = []
        for active in ([1, 1], [1, 0], [0, 1]):
            with pytest.warns(UserWarning, match="BatchNorm"):
                schedule = mf.availability.Explicit(np.array([active], bool))
                runs.append(
                    mf.simulate(model, digits["data"], digits["split"][:2], availability=schedule, local=mf.LocalSGD(steps=2)).buffers
                )
        torch.testing.assert_close(runs[0]["2.running_mean"], (runs[1]["2.running_mean"] + runs[2]["2.running_mean"]) / 2)
        extra = sum(b.numel() * b.element_size() for b in runs[0].values())
        assert extra == 8 * 4 * 2 + 8


def test_evaluation_can_be_rarer(digits):
    history = mf.simulate(**digits, availability="time-varying:0.1", rounds=7, eval_every=3)
    assert [row["test_accuracy"] is not None for row in history.rows] == [False, False, True, False, False, True, True]


def test_regression_and_binary_tasks():
    for kind in ("quadratic", "logistic"):
        data = mf.datasets.load(f"synthetic:{kind}", num_clients=5, dim=3)
        history = mf.simulate(mf.models.build("linear", data), data, mf.partition.by_ids(data.ids), rounds=3)
        assert (history.rows[-1]["test_accuracy"] is None) == (kind == "quadratic")
        assert history.rows[-1]["distance"] > 0


def test_custom_loss_and_custom_data():
    x = torch.randn(200, 4)
    y = (x[:, 0] > 0).long()

    def smooth(output, target):
        return nn.functional.cross_entropy(output, target, label_smoothing=0.1)

    data = mf.Data(x[:140].numpy(), y[:140].numpy(), x[140:], y[140:])
    history = mf.simulate(nn.Linear(4, 2), data, mf.partition.iid(data.y_train, 4), rounds=30, loss=smooth, local=mf.LocalSGD(lr=0.5))
    assert history.rows[-1]["test_accuracy"] > 0.8


def test_numpy_numbers_are_numbers(quadratic, tmp_path):
    schedule = mf.availability.Static(np.array([0.5] * 6))
    given = {"availability": schedule, "rounds": np.int64(2), "uploads": np.int32(9), "seed": np.int64(1), "eval_every": np.int64(2)}
    history = mf.simulate(**quadratic, **given, local=mf.LocalSGD(lr=np.float32(0.1)), out=tmp_path)
    assert len(history.rows) == 2
    assert mf.read(tmp_path).config["rounds"] == 2


def test_a_rate_with_defaults_of_its_own_is_a_function_of_t(quadratic):
    history = mf.simulate(**quadratic, rounds=2, local=mf.LocalSGD(lr=lambda t, base=0.05: base / (t + 1)))
    assert [row["local_lr"] for row in history.rows] == [0.05, 0.025]


def test_an_explicit_schedule_may_be_shorter_than_the_limits(quadratic):
    schedule = mf.availability.Explicit(np.ones((10, 6), bool))
    assert len(mf.simulate(**quadratic, availability=schedule, rounds=30, uploads=10).rows) == 10


def test_a_notice_says_which_engine_and_why(quadratic):
    said = []
    mf.simulate(**quadratic, rounds=1, notice=said.append)
    assert said == ["engine plain"]


class Annealed(nn.Module):
    """Counts its calls: in an attribute, or as it should, in a buffer."""

    def __init__(self, buffer):
        super().__init__()
        self.layer, self.width = nn.Linear(64, 10), 64
        if buffer:
            self.register_buffer("calls", torch.tensor(0))
        else:
            self.calls = 0

    def forward(self, x):
        self.last = x.numel()  # what does not change from call to call is a cache
        if self.training:
            self.calls += 1
        return self.layer(x.flatten(1)) / (1 + 0.01 * self.calls)


def test_a_model_that_counts_in_an_attribute_is_pointed_out(digits):
    """Such a run does not resume to the same bits, and engines do not agree."""
    given = {**digits, "availability": "always", "rounds": 1, "local": mf.LocalSGD(steps=1), "engine": "plain"}
    mf.simulate(**given | {"model": Annealed(buffer=True)})
    model = Annealed(buffer=False)
    with pytest.warns(UserWarning, match=r"attribute calls.*register_buffer"):
        mf.simulate(**given | {"model": model})
    assert model.calls == 0
