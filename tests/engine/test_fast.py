"""The fast cohorts against the plain one: same clients, same answers, whatever the sizes, the company and the algorithm's terms."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.data.clients import Clients
from mimicfl.engine import support
from mimicfl.engine.batched.cohort import BatchedCohort
from mimicfl.engine.batched.rewrite import chance
from mimicfl.engine.calls import without_dropout
from mimicfl.engine.cohort import Ask, PlainCohort
from mimicfl.engine.drive import exact
from mimicfl.engine.lanes import width
from mimicfl.engine.streams import StreamsCohort
from mimicfl.local.losses import as_loss
from mimicfl.metrics.store import RunFolder
from mimicfl.params import flatten

from .cohorts import DEVICES, MODELS, asks_of, assert_same, problem
from .models import Drops, Moody, accuracy_with_dropout


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [BatchedCohort, StreamsCohort])
@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_stacked_and_streamed_equal_plain(device, name, kind, lanes):
    model, clients = problem(MODELS[name](), device)
    asks = asks_of(model, clients)
    loss = as_loss("cross-entropy")
    assert_same(kind(model, clients, loss, lanes=lanes).train(asks), PlainCohort(model, clients, loss).train(asks))


@pytest.mark.parametrize("name", MODELS)
def test_what_streams_hand_to_the_compiler_equals_plain(monkeypatch, name):
    """The traced function of loss and gradients, without the compiler's minutes."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda traced, **_: seen.append(traced) or traced)
    model, clients = problem(MODELS[name]())
    asks = asks_of(model, clients)
    loss = as_loss("cross-entropy")
    assert_same(StreamsCohort(model, clients, loss, lanes=3, compiled=True).train(asks), PlainCohort(model, clients, loss).train(asks))
    assert len(seen) == 1


@pytest.mark.parametrize("kind", [BatchedCohort, StreamsCohort])
def test_the_compiler_gets_one_program_whatever_the_company_and_no_clock(monkeypatch, kind):
    """With another program, or another choice by timing, it may sum in another order, and a recorded number would not come again."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda traced, **how: seen.append((traced.code, how["options"])) or traced)
    model, clients = problem(MODELS["convolutions"]())
    for terms in (True, False):
        kind(model, clients, as_loss("cross-entropy"), lanes=3, compiled=True).train(asks_of(model, clients, terms=terms))
    assert seen[0] == seen[1]
    assert seen[0][1] == ({"deterministic": True} if "deterministic" in torch._inductor.list_options() else {})


@pytest.mark.parametrize("kind", [BatchedCohort, StreamsCohort])
@pytest.mark.parametrize(
    "local", [mf.LocalSGD(steps=3, batch_size=None), mf.LocalSGD(steps=7, batch_size=8), mf.LocalSGD(epochs=1, batch_size=64)]
)
def test_full_batches_and_odd_numbers_of_steps(kind, local):
    model, clients = problem(MODELS["mlp"]())
    asks = asks_of(model, clients, local)
    loss = as_loss("cross-entropy")
    assert_same(kind(model, clients, loss, lanes=2).train(asks), PlainCohort(model, clients, loss).train(asks))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [BatchedCohort, StreamsCohort])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])  # float32 has an update of its own on a GPU
@pytest.mark.parametrize(
    "terms", [{"momentum": 0.7}, {"clip_norm": 0.5}, {"momentum": 0.7, "clip_norm": 0.5}, {"epochs": [1, 3, 2] * 9}], ids=str
)
def test_momentum_clipping_and_unequal_work(device, kind, dtype, rtol, terms):
    """Lanes are used again: what the last client gathered must not move the next."""
    model, clients = problem(MODELS["convolutions"](), device, dtype)
    asks = asks_of(model, clients, mf.LocalSGD(**{"epochs": 2, "batch_size": 8, **terms}))
    loss = as_loss("cross-entropy")
    with exact("fp32"):
        assert_same(kind(model, clients, loss, lanes=2).train(asks), PlainCohort(model, clients, loss).train(asks), rtol)


@pytest.mark.parametrize("kind", [BatchedCohort, StreamsCohort])
def test_augmented_images(kind):
    model, clients = problem(MODELS["convolutions"](), augment=True)
    asks = asks_of(model, clients)
    loss = as_loss("cross-entropy")
    assert_same(kind(model, clients, loss, lanes=3).train(asks), PlainCohort(model, clients, loss).train(asks))


@pytest.mark.parametrize("name", ["mse", "binary", "smooth"])
def test_any_loss_that_is_a_mean_over_samples(name):
    x, y = torch.randn(50, 6, dtype=torch.float64), torch.arange(50) % 2
    data = mf.Data(x, y.double()[:, None] if name == "mse" else y, x[:5], y.double()[:5, None] if name == "mse" else y[:5])
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2 if name == "smooth" else 1)).double()
    clients = Clients(data, [np.arange(20), np.arange(20, 50)], torch.device("cpu"), torch.float64)
    loss = (lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1)) if name == "smooth" else as_loss(name)
    ask = Ask(clients, mf.LocalSGD(epochs=2, batch_size=8), 0, 0, flatten(model), {}, np.array([0, 1]), mf.Task(), 0.1, 0.1)
    assert_same(BatchedCohort(model, clients, loss).train([ask]), PlainCohort(model, clients, loss).train([ask]))


def test_company_changes_nothing():
    """A run's clients give the same answers alone and beside another run's, whatever lanes they land in."""
    model, clients = problem(MODELS["convolutions"]())
    asks = asks_of(model, clients)
    cohort = BatchedCohort(model, clients, as_loss("cross-entropy"), lanes=2)
    assert_same([cohort.train([ask])[0] for ask in asks], cohort.train(asks), rtol=1e-12)


class TestDropout:
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.4), nn.Linear(64, 10))

    @pytest.mark.parametrize("kind", [BatchedCohort, StreamsCohort])
    def test_is_keyed_by_run_round_client_and_step(self, kind):
        model, clients = problem(self.model())
        asks = asks_of(model, clients, terms=False)
        loss = as_loss("cross-entropy")
        first = kind(model, clients, loss, lanes=2).train(asks)
        assert_same(kind(model, clients, loss, lanes=5).train(asks[::-1])[::-1], first, rtol=1e-12)
        other = Ask(clients, asks[0].local, 4, 5, asks[0].w, {}, asks[0].active, mf.Task(), 0.05, 0.05)
        assert not torch.allclose(kind(model, clients, loss, lanes=2).train([other])[0].g, first[0].g)

    def test_lets_through_the_right_share_everywhere(self):
        draws = torch.stack([chance(torch.tensor(1234567 + k), (200,)) for k in range(500)])
        kept = (draws >= 0.4).double()
        assert kept.mean() == pytest.approx(0.6, abs=0.005)
        assert kept.mean(dim=0).std() == pytest.approx((0.6 * 0.4 / 500) ** 0.5, rel=0.2)  # no place is favoured
        assert kept.mean(dim=1).std() == pytest.approx((0.6 * 0.4 / 200) ** 0.5, rel=0.2)  # nor any key
        both = (kept[1:] - 0.6) * (kept[:-1] - 0.6)
        assert abs(both.mean()) < 0.005  # neighbouring keys know nothing of each other
        for left, right in ((kept[1:, :-1], kept[:-1, 1:]), (kept[1:, 1:], kept[:-1, :-1])):
            assert abs(((left - 0.6) * (right - 0.6)).mean()) < 0.005  # nor is one the other, moved by a place

    @pytest.mark.parametrize("kind", [BatchedCohort, StreamsCohort])
    def test_in_many_layers(self, kind):
        """Each layer draws its own, however many there are."""
        model, clients = problem(nn.Sequential(nn.Flatten(), *[nn.Dropout(0.5) for _ in range(6)], nn.Linear(64, 10)))
        [one, _] = kind(model, clients, as_loss("cross-entropy"), lanes=2).train(asks_of(model, clients, terms=False))
        share = (one.g[2, : 64 * 10].view(10, 64).abs().sum(dim=0) > 0).double().mean()
        assert share < 0.9  # 1/64 of the inputs pass all six; one mask for all would let half of them through in every step

    def test_may_be_called_as_a_function(self, digits):
        """It is compared with plain without its dropout, wherever that is called, and then trained with it."""
        said, arguments = [], {**digits, "model": Drops(), "rounds": 2, "availability": "static:0.2"}
        ours = mf.simulate(**arguments, engine="batched:3", notice=said.append)
        assert said == ["engine batched"]
        assert torch.equal(ours.params, mf.simulate(**arguments, engine="batched:3").params)
        quiet = without_dropout(Drops(), torch.zeros(2, 64))
        assert torch.equal(quiet(x := torch.rand(3, 64)), quiet(x))
        assert without_dropout(mf.models.MLP(64, 10), torch.zeros(2, 64)) is None

    def test_that_cannot_be_drawn_goes_on_plainly(self, digits, monkeypatch):
        """What is compared is the model without its dropout; that it can be drawn is found out before the first round as well."""

        def broken(key, shape):
            raise RuntimeError("no chance")

        monkeypatch.setattr("mimicfl.engine.batched.rewrite.chance", broken)
        said = []
        mf.simulate(**{**digits, "model": self.model()}, rounds=1, engine="batched:3", notice=said.append)
        assert said == ["engine plain: it cannot be stacked (no chance), so batched:3 cannot run it"]

    @pytest.mark.parametrize("dropout", [0.0, 0.4])
    def test_what_cannot_be_compiled_runs_as_traced(self, digits, monkeypatch, dropout):
        def broken(traced, **_):
            raise RuntimeError("no compiler today")

        monkeypatch.setattr(torch, "compile", broken)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 10))
        said, arguments = [], {**digits, "model": model, "rounds": 2, "availability": "static:0.2"}
        ours = mf.simulate(**arguments, engine="batched:3:compiled", notice=said.append)
        assert said == ["engine batched, not compiled: it cannot be stacked (no compiler today)"]
        assert torch.equal(ours.params, mf.simulate(**arguments, engine="batched:3").params)

    def test_trains(self, digits):
        torch.manual_seed(0)
        runs = [accuracy_with_dropout(digits, engine, rounds=15, epochs=2) for engine in ("batched", "plain")]
        assert runs[0] == pytest.approx(runs[1], abs=0.06)
        assert runs[0] > 0.7


@pytest.mark.filterwarnings("ignore:the model has BatchNorm")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Moody(), "cannot be stacked"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)), "running statistics"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.RReLU(), nn.Linear(8, 10)), "cannot be stacked"),
        (nn.Sequential(nn.Flatten(), nn.AlphaDropout(0.3), nn.Linear(64, 10)), "cannot be stacked"),
        (nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.AlphaDropout(0.3), nn.Linear(64, 10)), "cannot be stacked"),
    ],
)
def test_what_cannot_be_stacked_goes_on_plainly(digits, model, words):
    said = []
    history = mf.simulate(**{**digits, "model": model}, rounds=1, engine="batched", notice=said.append)
    assert len(history.rows) == 1
    assert len(said) == 1
    assert said[0].startswith("engine plain: ")
    assert words in said[0]


def test_memory_that_does_not_suffice_halves_the_lanes(monkeypatch):
    model, clients = problem(MODELS["mlp"]())
    asks = asks_of(model, clients)
    loss = as_loss("cross-entropy")
    cohort = BatchedCohort(model, clients, loss, lanes=6)
    real, tried = cohort._work_off, []

    def short_of_memory(jobs):
        tried.append(cohort.width)
        if cohort.width > 2:
            raise torch.OutOfMemoryError("no")
        return real(jobs)

    monkeypatch.setattr(cohort, "_work_off", short_of_memory)
    assert_same(cohort.train(asks), PlainCohort(model, clients, loss).train(asks))
    assert tried == [6, 3, 1]
    with pytest.raises(MemoryError, match="one client alone"):
        support.halving(cohort, lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))


def test_fewer_lanes_are_written_down(digits, monkeypatch, tmp_path):
    real = BatchedCohort._run

    def short_of_memory(cohort, jobs):
        if cohort.width > 2 and len(jobs) > 2:  # not yet while it is tried
            raise torch.OutOfMemoryError("no")
        return real(cohort, jobs)

    monkeypatch.setattr(BatchedCohort, "_run", short_of_memory)
    mf.simulate(**digits, rounds=2, engine="batched:4", out=tmp_path)
    _, facts = RunFolder(tmp_path).load("final")
    assert facts["engine"] == "batched:2"


def test_lanes_follow_the_schedule():
    cuda = torch.device("cuda")
    assert width([3, 2, 4, 3], cuda) == 4
    assert width([30] * 9, cuda) in range(15, 33)
    assert width([405] * 9, cuda) * 4 >= 405  # a few full waves, not one that is mostly empty
    assert width([100_000], cuda) <= 512
