"""The batched and streams engines equal plain for BatchNorm, recurrent layers and attention, in float64 and without a fallback of vmap."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

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

NO_SINGLES = (30, 7, 43, 2)  # no client has a batch of one sample, which BatchNorm refuses
LOSS = as_loss("cross-entropy")


def normalised(image=nn.BatchNorm2d, vector=nn.BatchNorm1d, **how):
    hidden = nn.Sequential(nn.Linear(144, 6), vector(6, **how), nn.ReLU(), nn.Linear(6, 10))
    return nn.Sequential(nn.Conv2d(1, 4, 3), image(4, **how), nn.ReLU(), nn.Flatten(), hidden)


class Frozen(nn.Module):
    """One BatchNorm stays in evaluation mode while the model trains; the other trains."""

    def __init__(self):
        super().__init__()
        self.fixed, self.moving, self.head = nn.BatchNorm2d(1), nn.BatchNorm1d(64), nn.Linear(64, 10)
        self.fixed.running_mean.fill_(0.3)

    def train(self, mode=True):
        super().train(mode)
        self.fixed.eval()
        return self

    def forward(self, x):
        return self.head(self.moving(self.fixed(x).flatten(1)))


class OverTime(nn.Module):
    """BatchNorm over the rows of all samples, merged into one dimension: sample by sample, or row by row."""

    def __init__(self, by_row=False):
        super().__init__()
        self.norm, self.head, self.by_row = nn.BatchNorm1d(8), nn.Linear(64, 10), by_row

    def forward(self, x):
        x = x[:, 0].transpose(0, 1) if self.by_row else x[:, 0]
        x = self.norm(x.reshape(-1, 8)).view(x.shape)
        return self.head((x.transpose(0, 1) if self.by_row else x).flatten(1))


class Functional(nn.Module):
    """Calls the function, with keywords, and twice with the same running statistics."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("variance", torch.ones(1))

    def forward(self, x):
        for momentum in (0.2, 0.5):
            x = F.batch_norm(input=x + 1, running_mean=self.mean, running_var=self.variance, training=self.training, momentum=momentum)
        return self.head(x.flatten(1))


class Counter(nn.Module):
    """Counts its batches, besides a buffer that never changes and is not finite."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("constant", torch.tensor([-torch.inf, torch.nan]))

    def forward(self, x):
        if self.training:
            self.batches = self.batches + 1
        return self.head(x.flatten(1))


NORMS = {
    "batch norm": normalised,
    "cumulative": lambda: normalised(momentum=None),
    "no running statistics": lambda: normalised(track_running_stats=False),
    "not affine": lambda: normalised(affine=False),
    "momentum": lambda: normalised(momentum=0.7, eps=0.01),
    "frozen": Frozen,
    "over time": OverTime,
    "functional": Functional,
    "instance norm": lambda: normalised(nn.InstanceNorm2d, nn.LayerNorm),
    "running instance norm": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, affine=True, track_running_stats=True), nn.Flatten(), nn.Linear(108, 10)
    ),
    "group norm": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 10)),
    "counter": Counter,
}


class Recurrent(nn.Module):
    """Uses the outputs of all steps, and the last states."""

    def __init__(self, kind, **how):
        super().__init__()
        self.layer = kind(8, 6, **how)
        width = (how.get("proj_size") or 6) * (1 + how.get("bidirectional", False))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = x[:, 0] if self.layer.batch_first else x[:, 0].transpose(0, 1)
        outputs, states = self.layer(x)
        states = states if isinstance(states, tuple) else (states,)
        outputs = outputs if self.layer.batch_first else outputs.transpose(0, 1)
        return self.head(outputs.mean(1)) + sum(state.sum(dim=(0, 2))[:, None] for state in states)


class Cells(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell, self.head = kind(8, 5), nn.Linear(5, 10)

    def forward(self, x):
        state = None
        for step in x[:, 0].unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


TWICE = {"batch_first": True, "num_layers": 2, "bidirectional": True}
RECURRENT = {
    **{kind.__name__: lambda kind=kind: Recurrent(kind) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    **{f"{kind.__name__} twice": lambda kind=kind: Recurrent(kind, **TWICE) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    "projected": lambda: Recurrent(nn.LSTM, proj_size=3, **TWICE),
    "no bias": lambda: Recurrent(nn.GRU, bias=False),
    "relu": lambda: Recurrent(nn.RNN, nonlinearity="relu"),
    **{kind.__name__: lambda kind=kind: Cells(kind) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)},
}


class Attending(nn.Module):
    """Attention of two heads over eight positions; `attend` gets query, key and value [B, 2, 8, 4]."""

    def __init__(self, attend):
        super().__init__()
        self.project, self.head, self.attend = nn.Linear(8, 24), nn.Linear(8, 10), attend

    def forward(self, x):
        parts = [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x[:, 0]).chunk(3, -1)]
        return self.head(self.attend(*parts).transpose(1, 2).flatten(2).mean(1))


class Layered(nn.Module):
    """A layer of PyTorch on eight positions of eight features."""

    def __init__(self, layer, call=lambda layer, x: layer(x)):
        super().__init__()
        self.layer, self.head, self.call = layer, nn.Linear(8, 10), call

    def forward(self, x):
        return self.head(self.call(self.layer, x[:, 0]).mean(1))


def lower(x):
    return torch.ones(8, 8, dtype=torch.bool, device=x.device).tril()


def some_see_nothing(x):
    return torch.eye(8, dtype=torch.bool, device=x.device) & (torch.arange(8, device=x.device) > 2)


sdpa = F.scaled_dot_product_attention
ATTENTION = {
    "plain": lambda: Attending(sdpa),
    "causal": lambda: Attending(lambda q, k, v: sdpa(q, k, v, is_causal=True)),
    "boolean mask": lambda: Attending(lambda q, k, v: sdpa(q, k, v, attn_mask=lower(q))),
    "rows without keys": lambda: Attending(lambda q, k, v: sdpa(q, k, v, some_see_nothing(q))),
    "added mask": lambda: Attending(lambda q, k, v: sdpa(q, k, v, torch.sin(64.0 * lower(q).to(q.dtype).cumsum(1)), scale=0.3)),
    "grouped queries": lambda: Attending(lambda q, k, v: sdpa(q, k[:, :1], v[:, :1], enable_gqa=True)),
    "multihead": lambda: Layered(
        nn.MultiheadAttention(8, 2, batch_first=True), lambda layer, x: layer(x, x, x, attn_mask=~lower(x), need_weights=False)[0]
    ),
    "multihead weights": lambda: Layered(nn.MultiheadAttention(8, 2, batch_first=True), lambda layer, x: layer(x, x, x)[0]),
    "encoder": lambda: Layered(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
    "decoder": lambda: Layered(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), lambda layer, x: layer(x, x)),
}


class Shortcut(nn.Module):
    """Leaves out a mask that has no effect unless it is compiled, as models of `transformers` do."""

    def __init__(self):
        super().__init__()
        self.attending = Attending(self.attend)

    def attend(self, q, k, v):
        mask = (self.x > -torch.inf).all(dim=-1)
        if not torch.compiler.is_compiling() and mask.all():
            return sdpa(q, k, v)
        return sdpa(q, k, v, attn_mask=mask[:, None, None])

    def forward(self, x):
        self.x = x[:, 0]
        return self.attending(x)


ATTENTION["shortcut"] = Shortcut
LAYERS = {**NORMS, **RECURRENT, **ATTENTION}


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
        first = kind(model, clients, LOSS, lanes=2).train(requests)
        assert_same(kind(model, clients, LOSS, lanes=5).train(requests[::-1])[::-1], first, rtol=1e-12)
        other = [dataclasses.replace(request, seed=99) for request in requests]
        assert not torch.allclose(kind(model, clients, LOSS, lanes=2).train(other)[0].g, first[0].g)

    @pytest.mark.parametrize("name", DROPOUT)
    def test_is_found_and_disabled_for_the_comparison(self, name):
        model, x = DROPOUT[name](), torch.rand(3, 1, 8, 8)
        no_dropout = without_dropout(model, x)
        assert torch.equal(no_dropout(x), no_dropout(x))
        assert not torch.equal(model.train()(x), model(x))

    @pytest.mark.parametrize("name", ["LSTM twice", "plain", "multihead"])
    def test_none_is_found_where_there_is_none(self, name):
        assert without_dropout(LAYERS[name](), torch.rand(3, 1, 8, 8)) is None
