"""The batched and streams engines give the same updates as plain, for all client sizes, groups of runs and algorithm terms."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.clients.params import flatten
from mimicfl.data.clients import Clients
from mimicfl.engines import capabilities
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.stacked.batched.engine import BatchedEngine
from mimicfl.engines.stacked.batched.rewrite import uniform
from mimicfl.engines.stacked.lanes import width
from mimicfl.engines.stacked.streams import StreamsEngine
from mimicfl.engines.torch_overrides import without_dropout
from mimicfl.engines.torch_settings import exact
from mimicfl.metrics.store import RunFolder
from tests.engines.engines import DEVICES, MODELS, assert_same, problem, request_of, requests_of
from tests.engines.models import DataDependent, FunctionalDropout, accuracy_with_dropout


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_batched_and_streams_equal_plain(device, name, kind, lanes):
    model, clients = problem(MODELS[name](), device)
    requests = requests_of(model, clients)
    loss = as_loss("cross-entropy")
    assert_same(kind(model, clients, loss, lanes=lanes).train(requests), PlainEngine(model, clients, loss).train(requests))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_function_that_streams_compiles_equals_plain(monkeypatch, name):
    """The traced function is run without the compiler, which would take minutes."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda traced, **_: seen.append(traced) or traced)
    model, clients = problem(MODELS[name]())
    requests = requests_of(model, clients)
    loss = as_loss("cross-entropy")
    compiled = StreamsEngine(model, clients, loss, lanes=3, compiled=True)
    assert_same(compiled.train(requests), PlainEngine(model, clients, loss).train(requests))
    assert len(seen) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
def test_compiled_program_depends_neither_on_other_runs_nor_on_timing(monkeypatch, kind):
    """A different program, or a choice by timing, may change the order of sums and so the bits of a result."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda traced, **how: seen.append((traced.code, how["options"])) or traced)
    model, clients = problem(MODELS["convolutions"]())
    for terms in (True, False):
        kind(model, clients, as_loss("cross-entropy"), lanes=3, compiled=True).train(requests_of(model, clients, terms=terms))
    assert seen[0] == seen[1]
    assert seen[0][1] == ({"deterministic": True} if "deterministic" in torch._inductor.list_options() else {})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
@pytest.mark.parametrize(
    "local", [mf.LocalSGD(steps=3, batch_size=None), mf.LocalSGD(steps=7, batch_size=8), mf.LocalSGD(epochs=1, batch_size=64)]
)
def test_full_batches_and_odd_numbers_of_steps(kind, local):
    model, clients = problem(MODELS["mlp"]())
    requests = requests_of(model, clients, local)
    loss = as_loss("cross-entropy")
    assert_same(kind(model, clients, loss, lanes=2).train(requests), PlainEngine(model, clients, loss).train(requests))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])  # float32 has its own update kernel on a GPU
@pytest.mark.parametrize(
    "terms", [{"momentum": 0.7}, {"clip_norm": 0.5}, {"momentum": 0.7, "clip_norm": 0.5}, {"epochs": [1, 3, 2] * 9}], ids=str
)
def test_momentum_clipping_and_unequal_work(device, kind, dtype, rtol, terms):
    """Lanes are reused: the state of the previous client must not affect the next one."""
    model, clients = problem(MODELS["convolutions"](), device, dtype)
    requests = requests_of(model, clients, mf.LocalSGD(**{"epochs": 2, "batch_size": 8, **terms}))
    loss = as_loss("cross-entropy")
    with exact("fp32"):
        assert_same(kind(model, clients, loss, lanes=2).train(requests), PlainEngine(model, clients, loss).train(requests), rtol)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
def test_augmented_images(kind):
    model, clients = problem(MODELS["convolutions"](), augment=True)
    requests = requests_of(model, clients)
    loss = as_loss("cross-entropy")
    assert_same(kind(model, clients, loss, lanes=3).train(requests), PlainEngine(model, clients, loss).train(requests))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mse", "binary", "smooth"])
def test_any_loss_that_is_a_mean_over_samples(name):
    x, y = torch.randn(50, 6, dtype=torch.float64), torch.arange(50) % 2
    data = mf.Data(x, y.double()[:, None] if name == "mse" else y, x[:5], y.double()[:5, None] if name == "mse" else y[:5])
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2 if name == "smooth" else 1)).double()
    clients = Clients(data, [np.arange(20), np.arange(20, 50)], torch.device("cpu"), torch.float64)
    loss = (lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1)) if name == "smooth" else as_loss(name)
    request = request_of(
        clients, mf.LocalSGD(epochs=2, batch_size=8), 0, 0, flatten(model), {}, np.array([0, 1]), mf.Instructions(), 0.1, 0.1
    )
    assert_same(BatchedEngine(model, clients, loss).train([request]), PlainEngine(model, clients, loss).train([request]))


@pytest.mark.slow
def test_updates_do_not_depend_on_other_runs():
    """A run's clients give the same updates alone and together with another run's, whichever lanes they use."""
    model, clients = problem(MODELS["convolutions"]())
    requests = requests_of(model, clients)
    engine = BatchedEngine(model, clients, as_loss("cross-entropy"), lanes=2)
    assert_same([engine.train([request])[0] for request in requests], engine.train(requests), rtol=1e-12)


class TestDropout:
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.4), nn.Linear(64, 10))

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
    def test_is_keyed_by_run_round_client_and_step(self, kind):
        model, clients = problem(self.model())
        requests = requests_of(model, clients, terms=False)
        loss = as_loss("cross-entropy")
        first = kind(model, clients, loss, lanes=2).train(requests)
        assert_same(kind(model, clients, loss, lanes=5).train(requests[::-1])[::-1], first, rtol=1e-12)
        other = request_of(clients, requests[0].local, 4, 5, requests[0].w, {}, requests[0].active, mf.Instructions(), 0.05, 0.05)
        assert not torch.allclose(kind(model, clients, loss, lanes=2).train([other])[0].g, first[0].g)

    def test_masks_are_unbiased_and_uncorrelated(self):
        draws = torch.stack([uniform(torch.tensor(1234567 + k), (200,)) for k in range(500)])
        kept = (draws >= 0.4).double()
        assert kept.mean() == pytest.approx(0.6, abs=0.005)
        assert kept.mean(dim=0).std() == pytest.approx((0.6 * 0.4 / 500) ** 0.5, rel=0.2)  # equal for all positions
        assert kept.mean(dim=1).std() == pytest.approx((0.6 * 0.4 / 200) ** 0.5, rel=0.2)  # and for all keys
        both = (kept[1:] - 0.6) * (kept[:-1] - 0.6)
        assert abs(both.mean()) < 0.005  # neighbouring keys are uncorrelated
        for left, right in ((kept[1:, :-1], kept[:-1, 1:]), (kept[1:, 1:], kept[:-1, :-1])):
            assert abs(((left - 0.6) * (right - 0.6)).mean()) < 0.005  # also if shifted by one position

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
    def test_each_layer_draws_its_own_mask(self, kind):
        model, clients = problem(nn.Sequential(nn.Flatten(), *[nn.Dropout(0.5) for _ in range(6)], nn.Linear(64, 10)))
        [one, _] = kind(model, clients, as_loss("cross-entropy"), lanes=2).train(requests_of(model, clients, terms=False))
        share = (one.g[2, : 64 * 10].view(10, 64).abs().sum(dim=0) > 0).double().mean()
        assert share < 0.9  # 1/64 of the inputs pass all six; one mask for all would let half of them through in every step

    @pytest.mark.slow
    def test_functional_dropout_is_supported(self, digits):
        """The model is compared with plain without dropout and then trained with it."""
        notices, arguments = [], {**digits, "model": FunctionalDropout(), "rounds": 2, "availability": "static:0.2"}
        ours = mf.simulate(**arguments, engine="batched:3", notice=notices.append)
        assert notices == ["engine batched"]
        assert torch.equal(ours.params, mf.simulate(**arguments, engine="batched:3").params)
        no_dropout = without_dropout(FunctionalDropout(), torch.zeros(2, 64))
        assert torch.equal(no_dropout(x := torch.rand(3, 64)), no_dropout(x))
        assert without_dropout(mf.models.MLP(64, 10), torch.zeros(2, 64)) is None

    @pytest.mark.slow
    def test_failing_dropout_falls_back_to_plain(self, digits, monkeypatch):
        """The comparison with plain disables dropout; a failure to draw it must still be found before the first round."""

        def broken(key, shape):
            raise RuntimeError("no random numbers")

        monkeypatch.setattr("mimicfl.engines.stacked.batched.rewrite.uniform", broken)
        notices = []
        mf.simulate(**{**digits, "model": self.model()}, rounds=1, engine="batched:3", notice=notices.append)
        assert len(notices) == 1
        assert notices[0].startswith("engine plain: ")
        assert "(no random numbers), so batched:3 cannot run it" in notices[0]

    @pytest.mark.slow
    @pytest.mark.parametrize("dropout", [0.0, 0.4])
    def test_engine_runs_uncompiled_if_compiling_fails(self, digits, monkeypatch, dropout):
        def broken(traced, **_):
            raise RuntimeError("no compiler today")

        monkeypatch.setattr(torch, "compile", broken)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 10))
        notices, arguments = [], {**digits, "model": model, "rounds": 2, "availability": "static:0.2"}
        ours = mf.simulate(**arguments, engine="batched:3:compiled", notice=notices.append)
        assert len(notices) == 1
        assert notices[0].startswith("engine batched, not compiled: ")
        assert "no compiler today" in notices[0]
        assert torch.equal(ours.params, mf.simulate(**arguments, engine="batched:3").params)

    @pytest.mark.slow
    def test_accuracy_equals_plain(self, digits):
        torch.manual_seed(0)
        runs = [accuracy_with_dropout(digits, engine, rounds=15, epochs=2) for engine in ("batched", "plain")]
        assert runs[0] == pytest.approx(runs[1], abs=0.06)
        assert runs[0] > 0.7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (DataDependent(), "cannot be stacked"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.RReLU(), nn.Linear(8, 10)), "cannot be stacked"),
        (nn.Sequential(nn.Flatten(), nn.AlphaDropout(0.3), nn.Linear(64, 10)), "cannot be stacked"),
        (nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.AlphaDropout(0.3), nn.Linear(64, 10)), "cannot be stacked"),
    ],
)
def test_models_that_cannot_be_stacked_use_plain(digits, model, words):
    notices = []
    history = mf.simulate(**{**digits, "model": model}, rounds=1, engine="batched", notice=notices.append)
    assert len(history.rows) == 1
    assert len(notices) == 1
    assert notices[0].startswith("engine plain: ")
    assert words in notices[0]


@pytest.mark.slow
def test_lanes_are_halved_if_memory_runs_out(monkeypatch):
    model, clients = problem(MODELS["mlp"]())
    requests = requests_of(model, clients)[:1]
    loss = as_loss("cross-entropy")
    engine = BatchedEngine(model, clients, loss, lanes=6)
    real, tried = engine._build_and_run, []

    def short_of_memory(jobs):
        tried.append(engine.width)
        if engine.width > 2:
            raise torch.OutOfMemoryError("no")
        return real(jobs)

    monkeypatch.setattr(engine, "_build_and_run", short_of_memory)
    assert_same(engine.train(requests), PlainEngine(model, clients, loss).train(requests))
    assert tried == [6, 3, 1]
    with pytest.raises(MemoryError, match="one client alone"):
        capabilities.halve_until_it_fits(engine, lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))


@pytest.mark.slow
def test_halved_lanes_are_saved(digits, monkeypatch, tmp_path):
    real = BatchedEngine._run

    def short_of_memory(engine, jobs):
        if engine.width > 2 and len(jobs) > 2:  # not during the trial
            raise torch.OutOfMemoryError("no")
        return real(engine, jobs)

    monkeypatch.setattr(BatchedEngine, "_run", short_of_memory)
    mf.simulate(**digits, rounds=2, engine="batched:4", out=tmp_path)
    _, facts = RunFolder(tmp_path).load("final")
    assert facts["engine"] == "batched:2"


def test_number_of_lanes_fits_the_schedule():
    cuda = torch.device("cuda")
    assert width([3, 2, 4, 3], cuda) == 4
    assert width([30] * 9, cuda) in range(15, 33)
    assert width([405] * 9, cuda) * 4 >= 405  # a few full waves rather than one that is mostly empty
    assert width([100_000], cuda) <= 512
