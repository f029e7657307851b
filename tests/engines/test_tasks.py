"""Token prediction on every engine, with positions that do not count: the same updates as plain."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import mimicfl as mf
from mimicfl.engines.capabilities import Unsupported
from mimicfl.engines.native.engine import NativeEngine
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.stacked.batched.engine import BatchedEngine
from mimicfl.engines.stacked.streams import StreamsEngine
from mimicfl.engines.workers import WorkersEngine
from mimicfl.simulation.train import train
from tests.conftest import make_run, run_on
from tests.engines.engines import assert_same, requests_of
from tests.engines.inputs import LENGTH, WORDS, Tokens, clients_of, token_data


def test_plain_equals_a_loop_with_torch_cross_entropy():
    """torch averages over the counted positions of the batch, and gives nan where there are none; a task then gives 0."""
    model, clients = Tokens().double(), clients_of(token_data())
    request = requests_of(model, clients, mf.LocalSGD(epochs=1, batch_size=None), terms=False)[0]
    ours = PlainEngine(model, clients, mf.tasks.TokenPrediction()).train([request])[0]
    for client, rows in enumerate(clients.split):
        loss = F.cross_entropy(model(clients.x[rows]).transpose(1, 2), clients.y[rows])
        g = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
        torch.testing.assert_close(ours.g[client], g, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("words_last", [True, False])
@pytest.mark.parametrize("kind", [WorkersEngine, BatchedEngine, StreamsEngine])
def test_every_engine_equals_plain(kind, words_last):
    model, clients, task = Tokens(words_last).double(), clients_of(token_data()), mf.tasks.TokenPrediction()
    requests = requests_of(model, clients)
    engine = kind(model, clients, task, workers=2) if kind is WorkersEngine else kind(model, clients, task, lanes=3)
    assert_same(engine.train(requests), PlainEngine(model, clients, task).train(requests))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WorkersEngine, BatchedEngine])
def test_the_transformer_equals_plain(kind):
    model, clients = mf.models.Transformer(WORDS, LENGTH, width=8, layers=1, heads=2).double(), clients_of(token_data())
    task = mf.tasks.TokenPrediction()
    requests = requests_of(model, clients, mf.LocalSGD(steps=2, batch_size=8))
    engine = kind(model, clients, task, workers=2) if kind is WorkersEngine else kind(model, clients, task, lanes=3)
    assert_same(engine.train(requests), PlainEngine(model, clients, task).train(requests))


def test_the_transformer_does_not_see_later_tokens():
    model = mf.models.Transformer(WORDS, LENGTH, width=8, layers=2, heads=2)
    tokens = torch.arange(LENGTH)[None] % WORDS
    changed = tokens.clone()
    changed[0, -1] += 1
    torch.testing.assert_close(model(tokens)[:, :-1], model(changed)[:, :-1])
    assert not torch.allclose(model(tokens)[:, -1], model(changed)[:, -1])


def test_native_says_why_it_cannot():
    with pytest.raises(Unsupported, match="inputs are int64"):
        NativeEngine(Tokens(), clients_of(token_data(), dtype=torch.float32), mf.tasks.TokenPrediction())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "batched"])
def test_runs_that_train_together_equal_runs_alone(engine):
    data, model = token_data(), Tokens().double()
    split = np.array_split(np.arange(data.num_train), 4)

    def ends(seeds):
        runs = [make_run(model, data, split, rounds=2, seed=seed) for seed in seeds]
        return list(train(runs, [None] * len(runs), engine))

    for ours, alone in zip(ends([1, 2]), ends([1]) + ends([2]), strict=True):
        assert torch.equal(ours.params, alone.params)
        assert [row["test_perplexity"] for row in ours.rows] == [row["test_perplexity"] for row in alone.rows]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "targets"), [("classification", 3), ("regression", 0)])
def test_native_trains_and_evaluates_with_a_task(task, targets):
    x = torch.randn(60, 4)
    y = torch.arange(60) % 3 if targets else x[:, :2] * 2
    data = mf.Data(x, y, x[:9], y[:9])
    given = {"model": mf.models.MLP(4, 6, targets or 2), "data": data, "split": np.array_split(np.arange(60), 3), "rounds": 3}
    plain, ours = (run_on(engine, **given, task=task) for engine in ("plain", "native"))
    torch.testing.assert_close(ours.params, plain.params, rtol=1e-3, atol=1e-5)
    for key in ("test_loss", "test_accuracy" if targets else "test_rmse"):
        assert ours.rows[-1][key] == pytest.approx(plain.rows[-1][key], rel=1e-4)
