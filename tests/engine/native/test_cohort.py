"""The native cohort is held to the plain one: all algorithms, augmentation, dropout; and whatever cannot be compiled falls back."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.data.clients import Clients
from mimicfl.data.dataset import as_split
from mimicfl.engine.cohort import PlainCohort
from mimicfl.engine.native import Unsupported, build
from mimicfl.engine.native.cohort import NativeCohort, Plan, Program
from mimicfl.local.losses import as_loss
from mimicfl.params import flatten
from mimicfl.runner import resume

from ...conftest import run_on
from ..models import Moody, accuracy_with_dropout
from .problems import assert_close, needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def images():
    data = mf.datasets.load("digits")
    split = mf.partition.dirichlet(data.y_train, 12, 0.5, min_samples=3, seed=0)  # unequal clients, last batches of all sizes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 20), nn.ReLU(), nn.Linear(20, 10))
    return {"model": model, "data": data, "split": split}


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox:mu=0.5", "scaffold", "mifa", "mimic", "fedvarp", "fedavgm", "fedau"])
@pytest.mark.parametrize("update", ["sum", "mean"])
def test_all_algorithms_equal_the_plain_engine(images, algorithm, update):
    arguments = {**images, "algorithm": algorithm, "availability": "static:0.5,warm_start=true", "rounds": 4, "update": update}
    local = mf.LocalSGD(epochs=2, batch_size=16, lr=0.05)
    native, plain = (run_on(engine, **arguments, local=local, global_lr=0.02) for engine in ("native", "plain"))
    assert_close(native.params, plain.params, 1e-4)
    for ours, theirs in zip(native.rows, plain.rows, strict=True):
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-4)
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert ours["clients"] == theirs["clients"]


def test_threads_change_nothing(images):
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run_on("native", **images, availability="static:0.7", rounds=3).params)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_augmented_images_equal_the_plain_engine():
    x, y = torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8), torch.arange(60) % 4
    data = mf.Data(x, y, x, y, augment=True, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    given = {"model": model, "data": data, "split": mf.partition.iid(y, 4), "rounds": 2}
    runs = [run_on(engine, **given).params for engine in ("native", "plain")]
    assert_close(*runs, 1e-4)


def test_channels_are_scaled_each_by_its_own_formula():
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
        """A linear layer after dropout of ones: the gradient counts which inputs survived."""
        model = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Dropout(p), nn.Linear(50, 1, bias=False))
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(50))
            model[2].weight.fill_(1.0)
        data = self.data()
        program = Program(model, data, as_loss("mse"))
        plan = Plan([(np.tile(np.arange(64), steps), [64] * steps)], [key])
        g, _ = program.train(flatten(model), program.pool(data.x_train), program.target(data.y_train), plan, None, 1)
        return g[0, -50:], program, model, data

    @pytest.mark.parametrize("p", [0.2, 0.5])
    def test_survivors_are_scaled_up(self, p):
        g, *_ = self.masks(p, steps=40)
        # d loss / d w_j = mean over samples of output * m_j; outputs are near 50, m_j is 0 or 1/(1-p) with mean 1
        expected = 50 + p / (1 - p)
        assert float(g.mean() / 40) == pytest.approx(expected, rel=0.03)

    def test_keys_decide_and_evaluation_drops_nothing(self):
        one, program, model, data = self.masks(0.5, key=1)
        assert torch.equal(one, self.masks(0.5, key=1)[0])
        assert not torch.equal(one, self.masks(0.5, key=2)[0])
        assert_close(program.predict(flatten(model), program.pool(data.x_test), 1), model.eval()(data.x_test).detach())

    def test_in_a_whole_run(self, digits):
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


class TestFallingBack:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"model": Residual()}, "not a chain"),
            ({"model": Moody()}, "cannot be traced"),
            ({"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softplus())}, "Softplus layer with no native form"),
            ({"model": mf.models.MLP(64, 32, 10).double()}, "float64"),
            ({"loss": smooth}, "neither cross-entropy nor mse"),
        ],
    )
    def test_the_run_goes_on_and_says_why(self, digits, monkeypatch, change, words):
        monkeypatch.setattr("mimicfl.engine.pick.WORTH_IT", 0.0)
        said = []
        history = mf.simulate(**{**digits, **change}, rounds=1, notice=said.append)
        assert len(history.rows) == 1
        assert said[0].startswith("engine plain: ")
        assert words in said[0]
        mf.simulate(**{**digits, **change}, rounds=1, engine="native", notice=said.append)
        assert said[1].startswith("engine plain: ")
        assert said[1].endswith("so native cannot run it")

    def test_batchnorm(self, digits):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
        said = []
        with pytest.warns(UserWarning, match="GroupNorm"):
            mf.simulate(**{**digits, "model": model}, rounds=1, engine="native", notice=said.append)
        assert "buffers" in said[0]

    def test_no_compiler(self, digits, monkeypatch):
        monkeypatch.setattr("mimicfl.engine.pick.WORTH_IT", 0.0)
        monkeypatch.setattr(build.shutil, "which", lambda name: None)
        said = []
        mf.simulate(**digits, rounds=1, notice=said.append)
        assert said[0].startswith("engine plain: native cannot: no C++ compiler was found (install g++ or clang++)")

    def test_a_wrong_program_is_found_out(self, digits, monkeypatch):
        """The self-check compares with autograd before the first round."""
        from mimicfl.engine.native import cohort

        real = cohort.trace
        monkeypatch.setattr(cohort, "trace", lambda model, shape: [layer for layer in real(model, shape) if layer.kind != "relu"])
        clients = Clients(digits["data"], as_split(digits["split"], 1442), torch.device("cpu"), torch.float32)
        with pytest.raises(Unsupported, match="disagrees with PyTorch"):
            NativeCohort(digits["model"], clients, as_loss("cross-entropy"))


def test_trials_measure_and_leave_no_trace(digits):
    from mimicfl.engine.pick import Trial
    from mimicfl.engine.run import Run

    settings = {"algorithm": "mimic", "availability": "always", "rounds": 1, "uploads": None, "local": mf.LocalSGD(epochs=2), "loss": None}
    settings |= {"global_lr": "local", "update": "sum", "weighting": "uniform", "seed": 0, "device": "cpu", "eval_every": 1}
    run = Run(**digits, **settings)
    before = run.state.w.clone()
    plain = PlainCohort(run.template, run.clients, run.loss)
    native = NativeCohort(run.template, run.clients, run.loss)
    trial = Trial([run], plain)
    trial.check(native)
    assert trial.of(plain) > 0
    assert trial.of(native) > 0
    assert torch.equal(run.state.w, before)


def test_auto_takes_what_measures_fastest(digits, monkeypatch):
    said = []
    mf.simulate(**digits, rounds=2, notice=said.append)
    assert "too short" in said[0]
    monkeypatch.setattr("mimicfl.engine.pick.WORTH_IT", 0.0)
    monkeypatch.setattr("mimicfl.engine.pick.Trial.of", lambda trial, cohort: 3.0 if cohort.name == "plain" else 1.0)
    mf.simulate(**digits, rounds=2, notice=said.append)
    assert said[1] == "engine native: measured 3 times as fast as plain here"
    monkeypatch.setattr("mimicfl.engine.pick.Trial.of", lambda trial, cohort: 1.0 if cohort.name == "plain" else 2.0)
    mf.simulate(**digits, rounds=2, notice=said.append)
    assert said[2] == "engine plain: measured 2.0 times as fast as native here"


def test_a_stopped_native_run_ends_bit_equal(tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def stop(e, row, total):
        if row["round"] == 3:
            raise Stop

    e = mf.Experiment(rounds=8, availability="static:0.3", engine="native", checkpoint_every=2)
    said = []
    whole = mf.run(e, tmp_path / "whole", notice=said.append)
    assert said == ["engine native"]
    with pytest.raises(Stop):
        mf.run(e, tmp_path / "stopped", stop)
    again = resume(tmp_path / "stopped")
    assert torch.equal(whole.params, again.params)
    # An "auto" run keeps the engine it began with, whatever would measure fastest now.
    monkeypatch.setattr("mimicfl.engine.pick.WORTH_IT", 0.0)
    monkeypatch.setattr("mimicfl.engine.pick.trial", lambda cohort, run: 3.0 if cohort.name == "plain" else 1.0)
    auto = mf.Experiment(rounds=8, availability="static:0.3", checkpoint_every=2)
    with pytest.raises(Stop):
        mf.run(auto, tmp_path / "auto", stop)
    monkeypatch.setattr("mimicfl.engine.pick.WORTH_IT", 1e9)
    said = []
    assert torch.equal(resume(tmp_path / "auto", notice=said.append).params, whole.params)
    assert said == ["engine native"]
