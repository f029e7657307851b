"""How "auto" decides: work counted in calls and operations, one check of the estimate during the run; and what a resumed run keeps."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.engine import cost, pick
from mimicfl.engine.cost import Cost, Workload
from mimicfl.engine.provisional import Provisional
from mimicfl.metrics.store import RunFolder

from .test_equality import run_of


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
        """Forward, and twice as much backward, except for the gradient of the inputs."""
        run = run_of({**digits, "model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))})
        found = Cost.of(run)
        assert found.flops == (0, 2 * 2 * 64 * 10)
        assert (found.products, found.convolutions) == (2, 0)
        assert Cost.of(run) == found

    def test_of_a_convnet_goes_by_its_arithmetic_and_calls(self, digits):
        """As many parameters as a small MLP, and many times the work."""
        net = resnet()
        hidden = sum(p.numel() for p in net.parameters()) // 75
        runs = [run_of({**digits, "model": model}, local=mf.LocalSGD(epochs=5)) for model in (net, mf.models.MLP(64, hidden, 10))]
        convnet, mlp = (Workload([run]).total for run in runs)
        assert runs[0].work.w.numel() == pytest.approx(runs[1].work.w.numel(), rel=0.05)
        assert convnet > 5 * mlp

    def test_of_a_model_that_cannot_be_watched_is_guessed(self, digits, monkeypatch):
        monkeypatch.setattr(cost, "_counted", lambda run, samples: 1 / 0)
        assert Workload([run_of(digits)]).total > 0

    @pytest.mark.filterwarnings("ignore:the model has BatchNorm")
    def test_counting_leaves_no_trace(self, digits):
        run = run_of({**digits, "model": nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, affine=False), nn.Linear(64, 10))})
        before, drawn = run.work.buffers(), torch.get_rng_state()
        Cost.of(run)
        assert all(torch.equal(before[name], value) for name, value in run.work.buffers().items())
        assert torch.equal(drawn, torch.get_rng_state())

    def test_follows_the_schedule_and_unequal_clients(self, digits):
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


class TestSecondLook:
    """A clock that runs a million times too fast makes every estimate wrong."""

    @pytest.fixture
    def wrong(self, auto, monkeypatch):
        slow = {kind: cost.Speed(*[value * 1e-6 for value in vars(speed).values()]) for kind, speed in cost.SPEED.items()}
        monkeypatch.setattr(cost, "SPEED", slow)
        monkeypatch.setattr(pick, "WORTH_IT", 1e-3)
        monkeypatch.setattr(pick.Trial, "of", lambda trial, cohort: 3.0 if cohort.name == "plain" else 1.0)

    def given(self, digits):
        return {**digits, "rounds": 20, "availability": "static:0.2", "local": mf.LocalSGD(epochs=1)}

    def test_takes_another_engine_with_one_more_notice(self, digits, wrong, tmp_path):
        said = []
        mf.simulate(**self.given(digits), notice=said.append, out=tmp_path)
        assert len(said) == 2
        assert "too short" in said[0]
        assert said[1].startswith("engine native: ")
        assert "slower than estimated" in said[1]
        assert RunFolder(tmp_path).load("final")[1]["engine"] == "native"

    @pytest.mark.parametrize("at", [0, 1, 2, 5])
    def test_and_an_interrupted_run_ends_bit_equal(self, digits, wrong, tmp_path, at):
        """Stopped before the check, it makes it in the same round; stopped after it, it keeps its engine."""
        whole = mf.simulate(**self.given(digits))
        with pytest.raises(Stop):
            mf.simulate(**self.given(digits), out=tmp_path, checkpoint_every=1, progress=stopping(at))
        said = []
        assert torch.equal(mf.simulate(**self.given(digits), out=tmp_path, notice=said.append).params, whole.params)
        assert RunFolder(tmp_path).load("final")[1]["engine"] == "native"
        plain = mf.simulate(**self.given(digits), engine="plain").params
        assert not torch.equal(plain, whole.params)

    def test_what_was_decided_is_saved_at_once(self, digits, wrong, tmp_path):
        """With checkpoints far apart, the one before the first round on another engine is the one that counts."""
        whole = mf.simulate(**self.given(digits))
        with pytest.raises(Stop):
            mf.simulate(**self.given(digits), out=tmp_path, checkpoint_every=1000, progress=stopping(6))
        facts = RunFolder(tmp_path).load("checkpoint")[1]
        assert facts["engine"] == "native"
        assert 0 < int(facts["round"]) < 6
        assert torch.equal(mf.simulate(**self.given(digits), out=tmp_path).params, whole.params)

    def test_stays_where_the_estimate_was_right(self, digits, auto, monkeypatch):
        monkeypatch.setattr(Provisional, "_slower", lambda cohort: 2.9)
        monkeypatch.setattr(pick, "WORTH_IT", 100.0)
        said = []
        ours = mf.simulate(**self.given(digits), notice=said.append)
        assert len(said) == 1
        assert torch.equal(ours.params, mf.simulate(**self.given(digits), engine="plain").params)

    def test_stays_where_too_little_is_left(self, digits, auto, monkeypatch):
        monkeypatch.setattr(Provisional, "_slower", lambda cohort: 4.0)
        monkeypatch.setattr(pick, "WORTH_IT", 1e6)
        said = []
        mf.simulate(**self.given(digits), notice=said.append)
        assert len(said) == 1

    def test_a_named_engine_is_kept(self, digits, wrong):
        said = []
        mf.simulate(**self.given(digits), engine="plain", notice=said.append)
        assert said == ["engine plain"]


class TestResumed:
    def given(self, digits):
        return {**digits, "rounds": 4, "availability": "static:0.2", "checkpoint_every": 1}

    def stopped(self, digits, out, engine):
        with pytest.raises(Stop):
            mf.simulate(**self.given(digits), out=out, engine=engine, progress=stopping(1))

    def test_on_another_engine_says_so(self, digits, tmp_path):
        self.stopped(digits, tmp_path, "plain")
        said = []
        mf.simulate(**self.given(digits), out=tmp_path, engine="batched:3", notice=said.append)
        assert len(said) == 1
        assert "resumed from plain" in said[0]
        assert "rounding" in said[0]

    def test_on_the_same_engine_keeps_its_lanes(self, digits, tmp_path):
        self.stopped(digits, tmp_path, "batched:3")
        said = []
        mf.simulate(**self.given(digits), out=tmp_path, engine="batched", notice=said.append)
        assert said == ["engine batched"]
        assert RunFolder(tmp_path).load("final")[1]["engine"] == "batched:3"

    @pytest.mark.parametrize("later", [1, 3])
    def test_with_other_threads_keeps_their_number(self, digits, tmp_path, threads, later, monkeypatch):
        monkeypatch.setattr(cost, "SMALL_CALL", 0)
        threads(2)
        self.stopped(digits, tmp_path, "plain")
        assert RunFolder(tmp_path).load("checkpoint")[1]["threads"] == "2"
        threads(later)
        seen = []
        mf.simulate(**self.given(digits), out=tmp_path, progress=lambda row, total: seen.append(torch.get_num_threads()))
        assert seen == [2, 2]
        assert torch.get_num_threads() == later
