"""The native engine equals the plain one, for all algorithms, augmentation and dropout, and falls back if a model cannot be compiled."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.clients.params import flatten
from mimicfl.data.arrays import as_split
from mimicfl.data.clients import Clients
from mimicfl.engines.native import Unsupported, build, network
from mimicfl.engines.native.engine import Batches, NativeEngine, Program
from mimicfl.engines.plain import PlainEngine
from tests.conftest import BUILT_IN, make_run, resume, run_on
from tests.engines.models import DataDependent, accuracy_with_dropout
from tests.engines.native.problems import assert_close, needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def images():
    data = mf.datasets.load("digits")
    split = mf.partition.dirichlet(data.y_train, 12, 0.5, min_samples=3, seed=0)  # different sizes and last batches
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 20), nn.ReLU(), nn.Linear(20, 10))
    return {"model": model, "data": data, "split": split}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "update"),  # the mean also depends on the numbers of steps that the engine returns
    [("fedprox:mu=0.5" if name == "fedprox" else name, "mean") for name in BUILT_IN if name != "focus"] + [("mimic", "sum")],
)
def test_all_algorithms_equal_the_plain_engine(images, algorithm, update):
    arguments = {**images, "algorithm": algorithm, "availability": "static:0.5,warm_start=true", "rounds": 4, "update": update}
    local = mf.LocalSGD(epochs=2, batch_size=16, lr=0.05)
    native, plain = (run_on(engine, **arguments, local=local, global_lr=0.02) for engine in ("native", "plain"))
    assert_close(native.params, plain.params, 1e-4)
    for ours, theirs in zip(native.rows, plain.rows, strict=True):
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-4)
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert ours["clients"] == theirs["clients"]


@pytest.mark.slow
def test_an_algorithm_whose_clients_send_more_than_g_runs_on_plain(images):
    told = []
    mf.simulate(
        **images, algorithm="focus", rounds=1, local=mf.LocalSGD(epochs=1, batch_size=16, lr=0.05), engine="native", notice=told.append
    )
    assert told[0].startswith("engine plain")
    assert "last_gradient" in told[0]


@pytest.mark.slow
def test_results_do_not_depend_on_threads(images):
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run_on("native", **images, availability="static:0.7", rounds=3).params)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.slow
def test_augmented_images_equal_the_plain_engine():
    x, y = torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8), torch.arange(60) % 4
    data = mf.Data(x, y, x, y, augment=True, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    given = {"model": model, "data": data, "split": mf.partition.iid(y, 4), "rounds": 2}
    runs = [run_on(engine, **given).params for engine in ("native", "plain")]
    assert_close(*runs, 1e-4)


@pytest.mark.slow
def test_each_channel_has_its_own_scaling():
    x, y = torch.randint(0, 256, (30, 3, 6, 6), dtype=torch.uint8), torch.arange(30) % 3
    data = mf.Data(x, y, x, y, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    program = Program(model, data, as_loss("cross-entropy"))
    assert program.uint8
    assert_close(program.predict(flatten(model), program.pool(x), 1), model(data.inputs(x, torch.float32)).detach())


class TestDropout:
    def data(self):
        x = torch.ones(64, 50)
        return mf.Data(x, torch.zeros(64, 1), x, torch.zeros(64, 1))

    def masks(self, p, key=0, steps=1):
        """Train a linear layer after dropout of ones, whose gradient counts the inputs that were kept."""
        model = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Dropout(p), nn.Linear(50, 1, bias=False))
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(50))
            model[2].weight.fill_(1.0)
        data = self.data()
        program = Program(model, data, as_loss("mse"))
        batches = Batches([(np.tile(np.arange(64), steps), [64] * steps)], [key])
        g, _ = program.train(flatten(model), program.pool(data.x_train), program.target(data.y_train), batches, [None], 1)
        return g[0, -50:], program, model, data

    @pytest.mark.slow
    @pytest.mark.parametrize("p", [0.2, 0.5])
    def test_kept_values_are_scaled_up(self, p):
        g, *_ = self.masks(p, steps=40)
        # d loss / d w_j = mean over samples of output * m_j; outputs are about 50, m_j is 0 or 1/(1-p) with mean 1
        expected = 50 + p / (1 - p)
        assert float(g.mean() / 40) == pytest.approx(expected, rel=0.03)

    @pytest.mark.slow
    def test_key_determines_the_mask_and_evaluation_has_no_dropout(self):
        one, program, model, data = self.masks(0.5, key=1)
        assert torch.equal(one, self.masks(0.5, key=1)[0])
        assert not torch.equal(one, self.masks(0.5, key=2)[0])
        assert_close(program.predict(flatten(model), program.pool(data.x_test), 1), model.eval()(data.x_test).detach())

    @pytest.mark.slow
    def test_accuracy_of_a_run_equals_plain(self, digits):
        torch.manual_seed(0)
        runs = [accuracy_with_dropout(digits, engine, rounds=25, epochs=4) for engine in ("native", "plain")]
        assert runs[0] == pytest.approx(runs[1], abs=0.05)
        assert runs[0] > 0.8


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.b(x + self.a(x))


def smooth(output, target):
    return F.cross_entropy(output, target, label_smoothing=0.1)


class TestFallback:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"model": Residual()}, "not a chain"),
            ({"model": DataDependent()}, "cannot be traced"),
            ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softplus())}, "Softplus layer, which native does not support"),
            ({"model": mf.models.MLP(64, 32, 10).double()}, "float64"),
            ({"loss": smooth}, "neither cross-entropy nor mse"),
        ],
    )
    def test_unsupported_model_or_loss_uses_plain_with_the_reason(self, digits, monkeypatch, change, words):
        monkeypatch.setattr("mimicfl.engines.select.WORTH_IT", 0.0)
        notices = []
        history = mf.simulate(**{**digits, **change}, rounds=1, notice=notices.append)
        assert len(history.rows) == 1
        assert notices[0].startswith("engine plain: ")
        assert words in notices[0]
        mf.simulate(**{**digits, **change}, rounds=1, engine="native", notice=notices.append)
        assert notices[1].startswith("engine plain: ")
        assert notices[1].endswith("so native cannot run it")

    def test_batchnorm(self, digits):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
        notices = []
        with pytest.warns(UserWarning, match="GroupNorm"):
            mf.simulate(**{**digits, "model": model}, rounds=1, engine="native", notice=notices.append)
        assert "buffers" in notices[0]

    def test_missing_compiler(self, digits, monkeypatch):
        monkeypatch.setattr("mimicfl.engines.select.WORTH_IT", 0.0)
        monkeypatch.setattr(build.shutil, "which", lambda name: None)
        notices = []
        mf.simulate(**digits, rounds=1, notice=notices.append)
        assert notices[0].startswith("engine plain: ")
        assert "no C++ compiler" in notices[0]
        assert "install g++" in notices[0]

    @pytest.mark.slow
    def test_wrong_program_is_refused(self, digits, monkeypatch):
        """The program is compared with autograd before the first round."""

        real = network.trace
        monkeypatch.setattr(network, "trace", lambda model, shape: [layer for layer in real(model, shape) if layer.kind != "relu"])
        clients = Clients(digits["data"], as_split(digits["split"], 1442), torch.device("cpu"), torch.float32)
        with pytest.raises(Unsupported, match="disagrees with PyTorch"):
            NativeEngine(digits["model"], clients, as_loss("cross-entropy"))


@pytest.mark.slow
def test_trials_do_not_change_the_run(digits):
    from mimicfl.engines.select import Trial

    run = make_run(**digits, local=mf.LocalSGD(epochs=2))
    before, problem = run.server.w.clone(), run.problem
    plain = PlainEngine(problem.template, problem.clients, problem.loss)
    native = NativeEngine(problem.template, problem.clients, problem.loss)
    trial = Trial([run], plain)
    trial.check(native)
    assert trial.seconds(plain) > 0
    assert trial.seconds(native) > 0
    assert torch.equal(run.server.w, before)


@pytest.mark.slow
def test_auto_chooses_the_fastest_engine(digits, monkeypatch):
    notices = []
    mf.simulate(**digits, rounds=2, notice=notices.append)
    assert "too short" in notices[0]
    monkeypatch.setattr("mimicfl.engines.select.WORTH_IT", 0.0)
    monkeypatch.setattr("mimicfl.engines.select.Trial.seconds", lambda trial, engine: 3.0 if engine.name == "plain" else 1.0)
    mf.simulate(**digits, rounds=2, notice=notices.append)
    assert notices[1] == "engine native: measured 3 times as fast as plain here"
    monkeypatch.setattr("mimicfl.engines.select.Trial.seconds", lambda trial, engine: 1.0 if engine.name == "plain" else 2.0)
    mf.simulate(**digits, rounds=2, notice=notices.append)
    assert notices[2] == "engine plain: measured 2.0 times as fast as native here"


@pytest.mark.slow
def test_resumed_native_run_ends_bit_equal(tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def stop(e, row, total):
        if row["round"] == 3:
            raise Stop

    e = mf.Experiment(rounds=8, availability="static:0.3", engine="native", checkpoint_every=2)
    notices = []
    whole = mf.run(e, tmp_path / "whole", notice=notices.append)
    assert notices == ["engine native"]
    with pytest.raises(Stop):
        mf.run(e, tmp_path / "stopped", stop)
    again = resume(tmp_path / "stopped")
    assert torch.equal(whole.params, again.params)
    # A resumed "auto" run keeps its engine, even if another one would be faster now.
    monkeypatch.setattr("mimicfl.engines.select.WORTH_IT", 0.0)
    monkeypatch.setattr("mimicfl.engines.trial.seconds_per_step", lambda engine, run: 3.0 if engine.name == "plain" else 1.0)
    auto = mf.Experiment(rounds=8, availability="static:0.3", checkpoint_every=2)
    with pytest.raises(Stop):
        mf.run(auto, tmp_path / "auto", stop)
    monkeypatch.setattr("mimicfl.engines.select.WORTH_IT", 1e9)
    notices = []
    assert torch.equal(resume(tmp_path / "auto", notice=notices.append).params, whole.params)
    assert notices == ["engine native"]
