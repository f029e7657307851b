"""How "auto" chooses an engine: the cost estimate, its check during the run, and what a resumed run keeps."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.engines import cost, select
from mimicfl.engines.cost import Cost, Workload
from mimicfl.engines.provisional import Provisional
from mimicfl.metrics.store import RunFolder
from tests.engines.native.problems import needs_compiler
from tests.engines.test_equality import run_of


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.n, self.m = nn.GroupNorm(2, width), nn.GroupNorm(2, width)

    def forward(self, x):
        return F.relu(x + self.m(self.b(F.relu(self.n(self.a(x))))))


def resnet(width=8):
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), *[Block(width) for _ in range(4)], nn.Flatten(), nn.Linear(64 * width, 10))


@pytest.fixture
def auto(monkeypatch):
    monkeypatch.delenv("MIMICFL_ENGINE")


@pytest.fixture
def threads():
    yield torch.set_num_threads
    torch.set_num_threads(1)


class Stop(Exception):
    pass


def stopping(round):
    def stop(row, total):
        if row["round"] == round:
            raise Stop

    return stop


class TestCost:
    def test_counts_products(self, digits):
        """One product forward and one backward for the weights; the gradient of the inputs is not needed."""
        run = run_of({**digits, "model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))})
        found = Cost.of(run.problem)
        assert found.flops == (0, 2 * 2 * 64 * 10)
        assert (found.products, found.convolutions) == (2, 0)
        assert Cost.of(run.problem) == found

    def test_convnet_costs_more_than_an_mlp_with_as_many_parameters(self, digits):
        net = resnet()
        hidden = sum(p.numel() for p in net.parameters()) // 75
        runs = [run_of({**digits, "model": model}, local=mf.LocalSGD(epochs=5)) for model in (net, mf.models.MLP(64, hidden, 10))]
        convnet, mlp = (Workload([run]).total for run in runs)
        assert runs[0].problem.workspace.w.numel() == pytest.approx(runs[1].problem.workspace.w.numel(), rel=0.05)
        assert convnet > 5 * mlp

    def test_is_guessed_if_counting_fails(self, digits, monkeypatch):
        monkeypatch.setattr(cost, "_counted", lambda run, samples: 1 / 0)
        assert Workload([run_of(digits)]).total > 0

    @pytest.mark.filterwarnings("ignore:the model has BatchNorm")
    def test_counting_changes_neither_buffers_nor_random_state(self, digits):
        run = run_of({**digits, "model": nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, affine=False), nn.Linear(64, 10))})
        before, drawn = run.problem.workspace.buffers(), torch.get_rng_state()
        Cost.of(run.problem)
        assert all(torch.equal(before[name], value) for name, value in run.problem.workspace.buffers().items())
        assert torch.equal(drawn, torch.get_rng_state())

    def test_depends_on_the_schedule_and_on_local_steps(self, digits):
        available = np.zeros((3, 30), dtype=bool)
        available[0], available[2, :15] = True, True
        work = Workload([run_of(digits, availability=mf.availability.Explicit(available), rounds=3)])
        [rounds] = work.rounds.values()
        assert rounds[1] == rounds[2] > 0
        assert rounds[2] < rounds[3] < 2 * rounds[1]
        steps = [1, 9] * 15
        [longer] = Workload([run_of(digits, local=mf.LocalSGD(steps=steps))]).rounds.values()
        [shorter] = Workload([run_of(digits, local=mf.LocalSGD(steps=1))]).rounds.values()
        assert longer[-1] > 2 * shorter[-1]


@pytest.mark.slow
@needs_compiler
def test_an_engine_that_another_program_delays_is_measured_again(digits, auto, monkeypatch):
    native = iter([5.0, 5.0, 0.1])
    monkeypatch.setattr(select, "WORTH_IT", 1e-3)
    monkeypatch.setattr(select.Trial, "seconds", lambda trial, engine: next(native) if engine.name == "native" else 1.0)
    notices = []
    mf.simulate(**digits, rounds=1, notice=notices.append)
    assert notices == ["engine native: measured 10 times as fast as plain here"]


class TestEstimateCheck:
    """Speeds that are a million times too high make every estimate wrong."""

    @pytest.fixture
    def wrong(self, auto, monkeypatch):
        slow = {kind: cost.Speed(*[value * 1e-6 for value in vars(speed).values()]) for kind, speed in cost.SPEED.items()}
        monkeypatch.setattr(cost, "SPEED", slow)
        monkeypatch.setattr(select, "WORTH_IT", 1e-3)
        monkeypatch.setattr(select.Trial, "seconds", lambda trial, engine: 3.0 if engine.name == "plain" else 1.0)

    def given(self, digits):
        return {**digits, "rounds": 20, "availability": "static:0.2", "local": mf.LocalSGD(epochs=1)}

    @pytest.mark.slow
    def test_wrong_estimate_changes_the_engine_with_a_notice(self, digits, wrong, tmp_path):
        notices = []
        mf.simulate(**self.given(digits), notice=notices.append, out=tmp_path)
        assert len(notices) == 2
        assert "too short" in notices[0]
        assert notices[1].startswith("engine native: ")
        assert "slower than estimated" in notices[1]
        assert RunFolder(tmp_path).load("final")[1]["engine"] == "native"

    @pytest.mark.slow
    @pytest.mark.parametrize("at", [0, 1, 2, 5])
    def test_interrupted_run_ends_bit_equal(self, digits, wrong, tmp_path, at):
        """A run stopped before the check repeats it after the same round; a run stopped after the check keeps its engine."""
        whole = mf.simulate(**self.given(digits))
        with pytest.raises(Stop):
            mf.simulate(**self.given(digits), out=tmp_path, checkpoint_every=1, progress=stopping(at))
        notices = []
        assert torch.equal(mf.simulate(**self.given(digits), out=tmp_path, notice=notices.append).params, whole.params)
        assert RunFolder(tmp_path).load("final")[1]["engine"] == "native"
        plain = mf.simulate(**self.given(digits), engine="plain").params
        assert not torch.equal(plain, whole.params)

    @pytest.mark.slow
    def test_change_of_engine_is_saved_at_once(self, digits, wrong, tmp_path):
        """A checkpoint is written before the first round on the new engine, even if regular checkpoints are far apart."""
        whole = mf.simulate(**self.given(digits))
        with pytest.raises(Stop):
            mf.simulate(**self.given(digits), out=tmp_path, checkpoint_every=1000, progress=stopping(6))
        facts = RunFolder(tmp_path).load("checkpoint")[1]
        assert facts["engine"] == "native"
        assert 0 < int(facts["round"]) < 6
        assert torch.equal(mf.simulate(**self.given(digits), out=tmp_path).params, whole.params)

    @pytest.mark.slow
    def test_engine_is_kept_if_the_estimate_was_right(self, digits, auto, monkeypatch):
        monkeypatch.setattr(Provisional, "_slower", lambda engine: 2.9)
        monkeypatch.setattr(select, "WORTH_IT", 100.0)
        notices = []
        ours = mf.simulate(**self.given(digits), notice=notices.append)
        assert len(notices) == 1
        assert torch.equal(ours.params, mf.simulate(**self.given(digits), engine="plain").params)

    def test_engine_is_kept_if_little_work_is_left(self, digits, auto, monkeypatch):
        monkeypatch.setattr(Provisional, "_slower", lambda engine: 4.0)
        monkeypatch.setattr(select, "WORTH_IT", 1e6)
        notices = []
        mf.simulate(**self.given(digits), notice=notices.append)
        assert len(notices) == 1

    def test_named_engine_is_kept(self, digits, wrong):
        notices = []
        mf.simulate(**self.given(digits), engine="plain", notice=notices.append)
        assert notices == ["engine plain"]


class TestResumed:
    def given(self, digits):
        return {**digits, "rounds": 4, "availability": "static:0.2", "checkpoint_every": 1}

    def stopped(self, digits, out, engine):
        with pytest.raises(Stop):
            mf.simulate(**self.given(digits), out=out, engine=engine, progress=stopping(1))

    @pytest.mark.slow
    def test_on_another_engine_gives_a_notice(self, digits, tmp_path):
        self.stopped(digits, tmp_path, "plain")
        notices = []
        mf.simulate(**self.given(digits), out=tmp_path, engine="batched:3", notice=notices.append)
        assert len(notices) == 1
        assert "resumed from plain" in notices[0]
        assert "rounding" in notices[0]

    @pytest.mark.slow
    def test_keeps_the_lanes_of_its_engine(self, digits, tmp_path):
        self.stopped(digits, tmp_path, "batched:3")
        notices = []
        mf.simulate(**self.given(digits), out=tmp_path, engine="batched", notice=notices.append)
        assert notices == ["engine batched"]
        assert RunFolder(tmp_path).load("final")[1]["engine"] == "batched:3"

    @pytest.mark.slow
    @pytest.mark.parametrize("later", [1, 3])
    def test_keeps_its_number_of_threads(self, digits, tmp_path, threads, later, monkeypatch):
        monkeypatch.setattr(cost, "SMALL_CALL", 0)
        threads(2)
        self.stopped(digits, tmp_path, "plain")
        assert RunFolder(tmp_path).load("checkpoint")[1]["threads"] == "2"
        threads(later)
        seen = []
        mf.simulate(**self.given(digits), out=tmp_path, progress=lambda row, total: seen.append(torch.get_num_threads()))
        assert seen == [2, 2]
        assert torch.get_num_threads() == later
