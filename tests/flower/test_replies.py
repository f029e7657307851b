"""Replies of clients: trained weights from unmodified apps, arrays of all types, and invalid replies, which must change nothing."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import mimicfl.flower as mff
from mimicfl.errors import UsageError
from tests.flower.problems import LOCAL, N, app, federate, flat, model_arrays, participation, problem, simulated

BASE = {"fraction_evaluate": 0.0, "lr": LOCAL.lr, "wait_for": N}


def unmodified():
    """A ClientApp as in Flower's own examples: it loads the arrays, trains in its own loop and returns its weights."""
    data, split, _ = problem()
    client = ClientApp()

    @client.train()
    def train(message, context):
        net = problem()[2]
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        number, t = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]) - 1
        x, y = data.x_train[split[number]].float(), data.y_train[split[number]].float()
        sizes = LOCAL.batch_sizes(len(x))
        order = LOCAL.order(len(x), sizes, batch_stream(t, number))
        optimizer = torch.optim.SGD(net.parameters(), lr=message.content["config"]["lr"])
        for rows in torch.from_numpy(order).split(sizes):
            optimizer.zero_grad()
            (0.5 * torch.nn.functional.mse_loss(net(x[rows]), y[rows].view(-1, 1))).backward()
            optimizer.step()
        reply = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
        return Message(RecordDict(reply), reply_to=message)

    return mff.identify(client)


def batch_stream(t, number):
    from mimicfl.seeds import stream

    return stream(0, "batches", t, number)


@pytest.mark.parametrize("name", ["FedAvg", "MimiC", "MIFA"])
def test_unmodified_apps_under_a_decaying_rate_match_the_simulator(name):
    """The server computes the updates from the weights: equal to the simulator up to the rounding of the weights."""
    available = np.array([[1] * N, [1, 0, 1, 0, 1], [0, 1, 1, 0, 0], [1, 1, 0, 1, 1], [1, 0, 0, 1, 0]], dtype=bool)
    strategy = getattr(mff, name)(availability=pattern(available), num_clients=N, **BASE)
    result, _ = federate(strategy, 5, unmodified())
    torch.testing.assert_close(flat(result.arrays), simulated(name.lower(), available).params, atol=3e-6, rtol=0)


def pattern(available):
    from mimicfl.participation import Explicit

    return Explicit(available)


def test_scaffold_refuses_clients_that_do_not_report_local_steps():
    """An app without SCAFFOLD support ignores the shift; its weights would silently make the control variates wrong."""
    strategy = mff.SCAFFOLD(num_clients=N, **BASE)
    with pytest.raises(UsageError, match="number of local steps"):
        federate(strategy, 1, unmodified())
    assert strategy.rows[0]["active"] == 0
    assert ["number of local steps" in why for why in strategy.rows[0]["failed"].values()] == [True] * N


def test_mimic_without_options_replaces_fedavg():
    """`MimiC()` in place of `FedAvg()`, learning rate in the train config: with full participation the results are equal."""
    result, _ = federate(mff.MimiC(), 2, unmodified(), train_config=ConfigRecord({"lr": 0.05}))
    from flwr.serverapp.strategy import FedAvg

    arrays, _ = model_arrays(problem()[2])
    federation = mff.Federation(unmodified(), N)
    with federation.running() as grid:
        theirs = FedAvg().start(grid, arrays, 2, 20.0, ConfigRecord({"lr": 0.05}))
    torch.testing.assert_close(flat(result.arrays), flat(theirs.arrays), atol=1e-6, rtol=0)


def test_arrays_of_all_shapes_and_types():
    """Parameters of three types form one vector; running statistics are averaged, counters take the maximum, and all keep their type."""
    arrays = {
        "half": np.array([[1.0, 2.0]], dtype=np.float16),
        "single": np.array(3.0, dtype=np.float32),
        "double": np.array([4.0, 5.0]),
        "norm.running_mean": np.array([10.0], dtype=np.float32),
        "norm.num_batches_tracked": np.array(7, dtype=np.int64),
        "flags": np.array([True, False]),
        "codes": np.array([3], dtype=np.uint16),
    }

    def client(node, message, context):
        if message.metadata.message_type != "train":
            return mff.hello(message, context)
        number = int(context.node_config["partition-id"])
        mine = {key: value.numpy().copy() for key, value in message.content["arrays"].items()}
        for key in ("half", "single", "double"):
            mine[key] = (mine[key] - 0.5 * (number + 1)).astype(mine[key].dtype)
        mine["norm.running_mean"] = mine["norm.running_mean"] + np.float32(number)
        mine["norm.num_batches_tracked"] = mine["norm.num_batches_tracked"] + number
        record = ArrayRecord({key: Array(np.asarray(value)) for key, value in mine.items()})
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    federation = mff.Federation(client, 3)
    with federation.running() as grid:
        strategy = mff.MimiC(fraction_evaluate=0.0, wait_for=3)
        result = strategy.start(grid, ArrayRecord({k: Array(v) for k, v in arrays.items()}), 1, 20.0)
    found = {key: value.numpy() for key, value in result.arrays.items()}
    assert {key: (value.dtype, value.shape) for key, value in found.items()} == {k: (v.dtype, v.shape) for k, v in arrays.items()}
    np.testing.assert_allclose(found["half"], [[0.0, 1.0]])
    np.testing.assert_allclose(found["single"], 2.0)
    np.testing.assert_allclose(found["double"], [3.0, 4.0])
    np.testing.assert_allclose(found["norm.running_mean"], [11.0])  # 10 + mean(0, 1, 2): no correction
    assert found["norm.num_batches_tracked"] == 9
    assert found["flags"].tolist() == [True, False]
    assert strategy.form.layout.size == 5


def test_running_statistics_that_are_not_finite_are_refused():
    arrays = ArrayRecord({"w": Array(np.ones(2)), "norm.running_var": Array(np.ones(2, dtype=np.float32))})

    def client(node, message, context):
        if message.metadata.message_type != "train":
            return mff.hello(message, context)
        record = message.content["arrays"]
        if context.node_config["partition-id"] == 1:
            record["norm.running_var"] = Array(np.array([1.0, np.inf], dtype=np.float32))
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    strategy = mff.MimiC(fraction_evaluate=0.0, wait_for=2)
    with mff.Federation(client, 2).running() as grid:
        strategy.start(grid, arrays, 1, 20.0)
    [(client, why)] = strategy.rows[0]["failed"].items()
    assert client == "1"
    assert "norm.running_var" in why
    assert "not finite" in why
    assert bool(torch.isfinite(strategy.form.buffers["norm.running_var"]).all())


def spoil(reply, how):
    record = reply.content["update"]
    g = record["g"].numpy().copy()
    if how == "shape":
        g = g[:-1]
    elif how == "type":
        g = g.astype(np.int32)
    elif how == "nan":
        g[3] = np.nan
    elif how == "norm":
        g *= 1e6
    elif how == "garbage":
        record["g"] = Array("float32", g.shape, "numpy.ndarray", b"\x93NUMPY but not really")
        return reply
    elif how == "pickle":
        record["g"] = Array("object", g.shape, "numpy.ndarray", pickled())
        return reply
    elif how == "samples":
        reply.content["metrics"]["num-examples"] = -1
    elif how == "missing":
        del record["g"]
        return reply
    record["g"] = Array(g)
    return reply


def pickled():
    import io

    raw = io.BytesIO()
    np.save(raw, np.array([{}], dtype=object), allow_pickle=True)
    return raw.getvalue()


REASONS = {
    "shape": "expected float32",
    "type": "is int32",
    "nan": "not finite",
    "norm": "moves the model by",
    "garbage": "cannot be read",
    "pickle": "cannot be read",
    "samples": "-1 samples",
    "missing": "update is missing",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", REASONS)
def test_invalid_reply_is_refused_and_changes_nothing(how):
    """Client 3 sends an invalid reply in round 1: the result is as if it had dropped out, and its correction is kept."""
    valid = app()

    def client(node, message, context):
        reply = valid(message, context)
        invalid = message.metadata.message_type == "train" and context.node_config["partition-id"] == 3
        return spoil(reply, how) if invalid and int(message.content["config"]["server-round"]) == 2 else reply

    strategy = mff.MimiC(max_norm=100.0, **BASE)
    federate(strategy, 3, client)
    assert REASONS[how] in strategy.rows[1]["failed"]["3"]
    assert participation(strategy.rows) == [[1] * 5, [1, 1, 1, 0, 1], [1] * 5]
    assert torch.equal(strategy.form.w, simulated("mimic", participation(strategy.rows)).params)


def test_weighting_by_samples_equals_the_simulator():
    strategy = mff.MimiC(weighting="samples", num_clients=N, **BASE)
    federate(strategy, 2)
    expected = simulated("mimic", [[1] * N] * 2, weighting="samples").params
    torch.testing.assert_close(strategy.form.w, expected, atol=1e-6, rtol=0)


def test_update_mean_equals_the_simulator():
    strategy = mff.SCAFFOLD(update="mean", num_clients=N, **BASE)
    federate(strategy, 2)
    assert torch.equal(strategy.form.w, simulated("scaffold", [[1] * N] * 2, update="mean").params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mff.SCAFFOLD(), "num_clients=N"),
        (lambda: mff.MIFA(num_clients=3, weighting="samples"), "sizes="),
        (lambda: mff.MimiC(availability="static:0.5"), "num_clients=N"),
        (lambda: mff.MimiC(late="maybe"), "late 'maybe' is unknown"),
        (lambda: mff.MimiC(max_norm=0), "max_norm must be"),
        (lambda: mff.MimiC(memory="none"), "memory 'none' is unknown"),
        (lambda: federate(mff.MimiC(**BASE), 0), "num_rounds must be"),
    ],
)
def test_wrong_options_raise_a_usage_error(make, message):
    with pytest.raises(UsageError, match=message):
        make()
