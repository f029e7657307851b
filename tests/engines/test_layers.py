"""The batched and streams engines equal plain for BatchNorm, recurrent layers and attention, in float64 and without a fallback of vmap."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import mimicfl as mf
from mimicfl.clients.losses import as_loss
from mimicfl.engines.capabilities import BatchUse
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.stacked.batched.engine import BatchedEngine
from mimicfl.engines.stacked.graphs import Graphs
from mimicfl.engines.stacked.streams import StreamsEngine
from mimicfl.engines.torch_overrides import without_dropout
from mimicfl.engines.torch_settings import exact
from tests.engines.engines import DEVICES, assert_same, needs_gpu, problem, requests_of
from tests.engines.layer_models import LAYERS, RECURRENT, TWICE, Attending, Counter, Frozen, Layered, OverTime, Recurrent, normalised, sdpa

NO_SINGLES = (30, 7, 43, 2)  # no client has a batch of one sample, which BatchNorm refuses
LOSS = as_loss("cross-entropy")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
def test_layers_equal_plain(device, name, kind):
    """Warnings are errors: vmap would warn of a fallback."""
    if (name, kind, device) == ("shortcut", StreamsEngine, "cuda"):
        pytest.skip("a CUDA graph cannot be captured while the model asks for the value of a tensor; a run uses another engine")
    model, clients = problem(LAYERS[name](), device, sizes=NO_SINGLES)
    requests = requests_of(model, clients)
    with exact("fp32"):
        assert_same(kind(model, clients, LOSS, lanes=3).train(requests), PlainEngine(model, clients, LOSS).train(requests))


@pytest.mark.slow
@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_of_plain_are_the_same_on_a_gpu(name):
    """PyTorch would take the vector of all parameters for the memory of the first layer, and what follows it for its biases."""
    model, found = RECURRENT[name]().double(), []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        _, clients = problem(model, device)
        [updates, _] = PlainEngine(model, clients, LOSS).train(requests_of(model, clients, terms=False))
        found.append(updates.g.cpu())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch norm", "cumulative", "frozen", "LSTM twice", "GRU", "causal", "encoder"])
def test_function_that_streams_compiles_equals_plain(monkeypatch, name):
    monkeypatch.setattr(torch, "compile", lambda traced, **_: traced)
    model, clients = problem(LAYERS[name](), sizes=NO_SINGLES)
    requests = requests_of(model, clients)
    compiled = StreamsEngine(model, clients, LOSS, lanes=3, compiled=True)
    assert_same(compiled.train(requests), PlainEngine(model, clients, LOSS).train(requests))


class TestBuffers:
    @pytest.mark.slow
    @pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
    def test_every_run_starts_from_its_own_statistics(self, kind):
        """In a group of runs, and in asynchronous training, clients start from different buffers."""
        model, clients = problem(normalised(), sizes=NO_SINGLES)
        first, second = requests_of(model, clients)
        moved = {name: value + 1 for name, value in second.buffers.items()}
        requests = [first, dataclasses.replace(second, buffers=moved)]
        plain = PlainEngine(model, clients, LOSS).train(requests)
        assert int(plain[1].buffers["1.num_batches_tracked"].min()) > int(plain[0].buffers["1.num_batches_tracked"].min()) - 8
        assert_same(kind(model, clients, LOSS, lanes=2).train(requests), plain)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
    def test_finished_lanes_keep_their_statistics(self, monkeypatch, kind):
        """A GPU makes many steps in one launch, also in lanes whose client has finished."""

        def many_steps(graphs, m, most):
            for step in graphs.steps[: max(1, m)]:
                for _ in range(most):
                    step()
            return most

        monkeypatch.setattr(Graphs, "advance", many_steps)
        model, clients = problem(normalised(), sizes=NO_SINGLES)
        requests = requests_of(model, clients)
        assert_same(kind(model, clients, LOSS, lanes=8).train(requests), PlainEngine(model, clients, LOSS).train(requests))

    @pytest.mark.slow
    def test_stacked_evaluation_uses_the_given_statistics(self):
        model, clients = problem(normalised(), sizes=NO_SINGLES)
        requests = requests_of(model, clients)
        engine, plain = BatchedEngine(model, clients, LOSS), PlainEngine(model, clients, LOSS)
        found = plain.train(requests)[0]
        some = [{name: rows[row] for name, rows in found.buffers.items()} for row in (0, 2)]
        w = torch.stack([request.w for request in requests])
        ours = engine.stack.outputs(w, engine.buffers.of_requests(some), clients.x[:20])
        plain.work.module.eval()
        for row in (0, 1):
            plain.work.load(w[row], some[row])
            torch.testing.assert_close(ours[row], plain.work.module(clients.inputs(slice(20))).detach(), rtol=1e-9, atol=1e-9)

    def test_use_of_a_batch_is_found(self):
        def use(model):
            return BatchUse.of(*problem(model))

        assert use(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))) == BatchUse((), False, False)
        assert use(Counter()).changing == ("batches", "constant")
        assert set(use(Frozen()).changing) == {f"moving.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
        assert use(normalised(track_running_stats=False)) == BatchUse((), True, True)
        images = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
        assert not use(images).refuses_one
        single = nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 1, 1, bias=False))  # written in place, with the same values
        assert use(nn.Sequential(single, nn.Flatten(), nn.Linear(64, 10))).changing

    @pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
    def test_batch_of_one_sample_is_refused_as_in_pytorch(self, kind):
        model, clients = problem(normalised())
        [request, _] = requests_of(model, clients)
        for engine in (PlainEngine(model, clients, LOSS), kind(model, clients, LOSS, lanes=2)):
            with pytest.raises(ValueError, match="more than 1 value per channel"):
                engine.train([dataclasses.replace(request, active=np.array([0, 3]), instructions=mf.Instructions())])
        without = dataclasses.replace(
            request, active=np.array([0]), instructions=mf.Instructions(), local=mf.LocalSGD(steps=3, batch_size=8)
        )
        kind(model, clients, LOSS, lanes=2).train([without])


class Averaging(nn.Module):
    """Keeps a running mean of its own, which would count the padding of a short batch."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, x):
        x = self.head(x.flatten(1))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


def simulated(model, engine, sizes=(31, 7, 43, 10), batch=8):
    x = torch.rand(sum(sizes), 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data, notices = mf.Data(x, torch.arange(len(x)) % 10, x[:10], torch.arange(10)), []
    split = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    given = {"local": mf.LocalSGD(epochs=2, batch_size=batch, lr=0.05), "algorithm": "mimic", "rounds": 3, "seed": 0}
    return mf.simulate(model=model, data=data, split=split, engine=engine, notice=notices.append, **given), notices


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model has BatchNorm")
class TestRuns:
    @pytest.mark.parametrize(
        "name", ["batch norm", "cumulative", "no running statistics", "frozen", "over time", "counter", "LSTM", "encoder"]
    )
    def test_whole_run_equals_plain(self, name):
        torch.manual_seed(0)
        model = LAYERS[name]().double()
        plain, (ours, notices) = simulated(model, "plain")[0], simulated(model, "batched:3")
        assert notices == ["engine batched"]
        torch.testing.assert_close(ours.params, plain.params, rtol=0, atol=1e-9)
        for key, value in plain.buffers.items():
            torch.testing.assert_close(ours.buffers[key], value, rtol=1e-9, atol=1e-9, equal_nan=True)
        assert [row["test_loss"] for row in ours.rows] == pytest.approx([row["test_loss"] for row in plain.rows], rel=1e-9)

    @pytest.mark.parametrize("make", [Averaging, lambda: OverTime(by_row=True)], ids=["own mean", "by row"])
    @pytest.mark.parametrize("sizes", [(31, 7, 43, 10), (32, 8, 40, 16)])
    def test_statistics_that_would_count_the_padding_use_plain(self, make, sizes):
        torch.manual_seed(0)
        model = make().double()
        plain, (ours, notices) = simulated(model, "plain", sizes)[0], simulated(model, "batched:3", sizes)
        assert notices[0].startswith("engine plain: its ")
        assert torch.equal(ours.params, plain.params)


DROPOUT = {
    "recurrent": lambda: Recurrent(nn.LSTM, dropout=0.5, **TWICE),
    "attention": lambda: Attending(lambda q, k, v: sdpa(q, k, v, dropout_p=0.5)),
    "multihead": lambda: Layered(nn.MultiheadAttention(8, 2, 0.5, batch_first=True), lambda layer, x: layer(x, x, x)[0]),
}


class TestDropout:
    """Dropout inside attention and between recurrent layers is drawn from the client's key, too."""

    @pytest.mark.slow
    @pytest.mark.parametrize("name", DROPOUT)
    @pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
    def test_is_keyed(self, name, kind):
        model, clients = problem(DROPOUT[name]())
        requests = requests_of(model, clients, terms=False)
        engine = kind(model, clients, LOSS, lanes=2)
        first = engine.train(requests)
        assert_same(kind(model, clients, LOSS, lanes=5).train(requests[::-1])[::-1], first, rtol=1e-12)
        other = [dataclasses.replace(request, seed=99) for request in requests]
        assert not torch.allclose(engine.train(other)[0].g, first[0].g)

    @pytest.mark.parametrize("name", DROPOUT)
    def test_is_found_and_disabled_for_the_comparison(self, name):
        model, x = DROPOUT[name](), torch.rand(3, 1, 8, 8)
        no_dropout = without_dropout(model, x)
        assert torch.equal(no_dropout(x), no_dropout(x))
        assert not torch.equal(model.train()(x), model(x))

    @pytest.mark.parametrize("name", ["LSTM twice", "plain", "multihead"])
    def test_none_is_found_where_there_is_none(self, name):
        assert without_dropout(LAYERS[name](), torch.rand(3, 1, 8, 8)) is None
