"""The round loop: counting, stopping, chance, buffers, and mistakes told in words."""

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


class TestChance:
    def test_same_seed_same_bits(self, digits):
        a, b, c = (mf.simulate(**digits, availability="static:0.2", rounds=4, seed=s) for s in (5, 5, 6))
        assert torch.equal(a.params, b.params)
        assert not torch.equal(a.params, c.params)
        strip = [{k: v for k, v in row.items() if k != "seconds"} for row in a.rows]
        assert strip == [{k: v for k, v in row.items() if k != "seconds"} for row in b.rows]

    def test_the_global_generators_are_neither_used_nor_moved(self, digits):
        torch.manual_seed(1)
        before = torch.random.get_rng_state()
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
        torch.random.set_rng_state(before)
        a = mf.simulate(model, digits["data"], digits["split"], rounds=2).params
        assert torch.equal(before, torch.random.get_rng_state())
        torch.manual_seed(99)
        np.random.seed(7)
        assert torch.equal(a, mf.simulate(model, digits["data"], digits["split"], rounds=2).params)

    def test_dropout_differs_between_clients_and_rounds(self, digits):
        class Spy(nn.Module):
            seen = []  # noqa: RUF012

            def __init__(self):
                super().__init__()
                self.flat, self.drop, self.layer = nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)

            def forward(self, x):
                if self.training:
                    Spy.seen.append(tuple((self.drop(torch.ones(32)) > 0).tolist()))
                return self.layer(self.flat(x))

        mf.simulate(Spy(), digits["data"], digits["split"], availability="time-varying:0.1", rounds=2, local=mf.LocalSGD(steps=1))
        assert len(Spy.seen) == 6
        assert len(set(Spy.seen)) == 6

    def test_a_client_draws_the_same_batches_in_any_cohort(self, quadratic):
        """Batches are keyed by round and client: alone or in company, client 2 does the same work."""
        alone, company = np.zeros((1, 6), bool), np.ones((1, 6), bool)
        alone[0, 2] = True
        local = mf.LocalSGD(steps=2, batch_size=3, lr=0.05)
        single = mf.simulate(**quadratic, algorithm="fedavg", availability=mf.availability.Explicit(alone), local=local).params
        parts = []
        for i in range(6):
            one = np.zeros((1, 6), bool)
            one[0, i] = True
            parts.append(mf.simulate(**quadratic, algorithm="fedavg", availability=mf.availability.Explicit(one), local=local).params)
        together = mf.simulate(**quadratic, algorithm="fedavg", availability=mf.availability.Explicit(company), local=local).params
        torch.testing.assert_close(torch.stack(parts).mean(0), together)
        assert torch.equal(parts[2], single)


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


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "scaffold", "mifa", "mimic"])
def test_gpu_equals_cpu(digits, algorithm):
    digits["model"].double()
    runs = [mf.simulate(**digits, algorithm=algorithm, availability="static:0.3", rounds=5, device=d).params for d in ("cpu", "cuda")]
    torch.testing.assert_close(*runs, rtol=1e-8, atol=1e-10)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", ["lenet", "vgg11"])
def test_convolutions_on_a_gpu_repeat_and_resume_to_the_bit(tmp_path, name):
    shape = (1, 28, 28) if name == "lenet" else (3, 32, 32)
    x, y = torch.randint(0, 256, (240, *shape), dtype=torch.uint8), torch.arange(240) % 10
    data = mf.Data(x, y, x[:40], y[:40], augment=name == "vgg11")
    arguments = {"model": mf.models.build(name, data), "data": data, "split": mf.partition.iid(y, 4), "device": "cuda", "rounds": 4}
    arguments |= {"algorithm": "mimic", "availability": "static:0.6,warm_start=true", "local": mf.LocalSGD(epochs=2, lr=0.05)}

    class Stop(Exception):
        pass

    def stop(row, total):
        if row["round"] == 2:
            raise Stop

    whole = mf.simulate(**arguments)
    assert torch.equal(whole.params, mf.simulate(**arguments).params)
    with pytest.raises(Stop):
        mf.simulate(**arguments, out=tmp_path, checkpoint_every=1, progress=stop)
    assert torch.equal(whole.params, mf.simulate(**arguments, out=tmp_path).params)


@pytest.mark.slow
def test_small_calls_are_not_shared_between_threads(digits):
    """Two threads gain little there, and stall when another program wants the cores; afterwards there are as many as before."""
    narrow = nn.Sequential(nn.Conv2d(1, 2, 8), nn.Flatten(), nn.Linear(2, 10))
    wide = nn.Sequential(nn.Conv2d(1, 256, 3, padding=1), nn.Conv2d(256, 256, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    before, seen = torch.get_num_threads(), {}
    torch.set_num_threads(3)
    try:
        for name, model in (("mlp", digits["model"]), ("narrow", narrow), ("wide", nn.Sequential(*wide, nn.Linear(256, 10)))):
            given = {**digits, "model": model, "rounds": 1, "engine": "plain", "availability": "static:0.01"}
            mf.simulate(**given, progress=lambda row, total, name=name: seen.update({name: torch.get_num_threads()}))
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == {"mlp": 1, "narrow": 1, "wide": 3}


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
