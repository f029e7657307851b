"""What of a model travels: adapters without the frozen model, tied weights once, any floating-point type."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from torch import nn

import mimicfl as mf
import mimicfl.flower as mff
from mimicfl.errors import UsageError
from mimicfl.flower.wire import Layout
from tests.flower.problems import flat

N = 3


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it; the input layer is tied to the output layer of the adapter's size."""

    def __init__(self, dtype=torch.float32, frozen_seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(frozen_seed)
            self.frozen = nn.Linear(64, 64)
            torch.manual_seed(1)
            self.a, self.b, self.head = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False), nn.Linear(64, 1)
        self.frozen.requires_grad_(False)
        self.tied = self.b
        self.register_buffer("mask", torch.ones(64), persistent=False)
        self.to(dtype)

    def forward(self, x):
        return self.head(torch.relu(self.frozen(x) + self.b(self.a(x))) * self.mask)


DATA = mf.datasets.load("synthetic", num_clients=N, dim=64, samples=8, heterogeneity=1.0, seed=3)
SPLIT = mf.partition.by_ids(DATA.ids)
LOCAL = mf.LocalSGD(epochs=1, batch_size=4, lr=0.02)


def data_of(context):
    part = SPLIT[int(context.node_config["partition-id"])]
    return DATA.x_train[part], DATA.y_train[part], DATA.x_test, DATA.y_test


def federation(model=Adapted, client_model=None, rounds=2, **settings):
    kept = {}
    server = mff.server_app(model, lambda: DATA, loss=DATA.loss, num_rounds=rounds, num_clients=N, wait_for=N, lr=0.02, **settings)
    original = mff.Federated.start

    def start(self, *arguments, **options):
        kept["strategy"] = self
        kept["result"] = original(self, *arguments, **options)
        return kept["result"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mff.Federated, "start", start)
        mff.simulate(server, mff.client_app(client_model or model, data_of, local=LOCAL, loss=DATA.loss), N)
    return kept["strategy"], kept["result"]


def test_only_adapters_travel():
    """Frozen parameters travel neither way, tied ones once; the result is that of the simulator."""
    strategy, result = federation()
    trained = 64 * 2 + 2 * 64 + 64 + 1
    assert set(result.arrays) == {"a.weight", "b.weight", "head.weight", "head.bias"}
    assert strategy.form.layout.size == trained
    assert strategy.rows[0]["bytes_up"] == strategy.rows[0]["bytes_down"] == N * 4 * trained
    expected = mf.simulate(Adapted(), DATA, SPLIT, "mimic", "always", 2, local=LOCAL, engine="plain")
    torch.testing.assert_close(flat(result.arrays), expected.params, atol=1e-6, rtol=0)


def test_clients_with_other_frozen_parameters_are_refused():
    with pytest.raises(UsageError, match="frozen parameters differ"):
        federation(client_model=lambda: Adapted(frozen_seed=5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_train(dtype):
    """The model travels in two bytes per number; updates, and the server's model, are in float32."""
    strategy, result = federation(lambda: Adapted(dtype), algorithm="fedavg")
    assert strategy.form.w.dtype == torch.float32
    assert strategy.rows[0]["bytes_down"] == N * 2 * strategy.form.layout.size
    assert strategy.rows[0]["bytes_up"] == N * 4 * strategy.form.layout.size
    plain, _ = federation(algorithm="fedavg")
    torch.testing.assert_close(strategy.form.w, plain.form.w, atol=0.02, rtol=0.05)
    loaded = mff.load_arrays(Adapted(dtype), result.arrays)
    assert loaded.a.weight.dtype == dtype
    assert torch.equal(loaded.a.weight.detach().float().reshape(-1), strategy.form.w[: 64 * 2].to(dtype).float())


@pytest.mark.parametrize("sent", [np.float16, "bfloat16", np.float64])
def test_answers_in_other_precisions_are_accepted(sent):
    """An app that casts its weights to half precision before it returns them."""

    def client(node, message, context):
        if message.metadata.message_type == "query":
            return mff.hello(message, context)
        value = torch.from_numpy(message.content["arrays"]["w"].numpy().copy()) + 0.25
        array = mff.trained_arrays(Holder(value.bfloat16()))["w"] if sent == "bfloat16" else Array(value.numpy().astype(sent))
        return Message(RecordDict({"arrays": ArrayRecord({"w": array}), "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    strategy = mff.MimiC(fraction_evaluate=0.0, wait_for=2)
    with mff.Federation(client, 2).running() as grid:
        strategy.start(grid, ArrayRecord({"w": Array(np.ones(4, np.float32))}), 1, 10.0)
    assert strategy.rows[0]["active"] == 2
    assert strategy.form.w.tolist() == [1.25] * 4


class Holder(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.w = nn.Parameter(value)


def test_bfloat16_survives_the_way_there_and_back():
    value = torch.tensor([[1.0, -2.5, 3.0e38, 1e-30]], dtype=torch.bfloat16)
    record = mff.trained_arrays(Holder(value.clone()))
    assert record["w"].dtype == "bfloat16"
    assert torch.equal(mff.load_arrays(Holder(torch.zeros_like(value)), record).w, value)
    layout = Layout.of(record)
    w, _ = layout.read(record)
    assert torch.equal(w, value.float().reshape(-1))
    assert layout.write(w, {})["w"].data == record["w"].data


def test_models_of_other_architecture_are_refused():
    record = mff.trained_arrays(Adapted())
    with pytest.raises(UsageError, match="same model function"):
        mff.load_arrays(nn.Linear(2, 2), record)
    record["a.weight"] = Array(np.zeros((3, 3), np.float32))
    with pytest.raises(UsageError, match=r"a\.weight"):
        mff.load_arrays(Adapted(), record)
