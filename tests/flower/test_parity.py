"""Side by side with Flower's own FedAvg: the same calls, arrays, metrics and log for the same app and settings."""

import re

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import mimicfl.flower as mff
from tests.flower.toy import Toy

CLIENTS = 4


class Recorded(Toy):
    """A toy app that records what it is asked."""

    def __init__(self, **options):
        super().__init__(lr=0.3, **options)
        self.calls = []

    def __call__(self, node, message, context):
        if message.metadata.message_type != "query":
            config = {key: value for key, value in sorted(message.content["config"].items()) if key not in ("seed", "reply")}
            self.calls.append((message.metadata.message_type, context.node_config["partition-id"], tuple(config.items())))
        return super().__call__(node, message, context)


def sizes(number):
    return {"num-examples": 1 + number, "train-loss": 0.5 * number, "weight": 2.0 + number}


def failing(number, reply, message):
    if number == 1 and message.content["config"]["server-round"] == 2:
        raise RuntimeError("out of memory")
    return reply


def evaluate_fn(server_round, arrays):
    return MetricRecord({"accuracy": 0.1 * server_round, "w": float(arrays["w"].numpy()[0])})


def started(strategy, client, log, rounds=3, arrays=None, clients=CLIENTS, **options):
    log.lines.clear()
    with mff.Federation(client, clients).running() as grid:
        result = strategy.start(grid, arrays or client.initial(), rounds, 20.0, **options)
    return result, list(log.lines)


def significant(lines, name):
    """The lines that both must log: not ours per round, not our ids, and with the name of the strategy replaced."""
    ours = re.compile(r"^round \d+/\d+:|does not report a client id|reconnected")
    return [line.replace(f"Starting {name} strategy", "Starting") for line in lines if not ours.search(line)]


def plain(metrics):
    return {t: {key: pytest.approx(value, rel=1e-5, abs=1e-6) for key, value in record.items()} for t, record in metrics.items()}


SETTINGS = {
    "defaults": ((), {}, {}, {}),
    "by position": ((1.0, 1.0, 3, 2, 4), {}, {}, {}),
    "no evaluation": ((), {"fraction_evaluate": 0.0}, {}, {}),
    "weighted by another key": ((), {"weighted_by_key": "weight"}, {}, {"metrics": sizes}),
    "unequal samples": ((), {}, {}, {"metrics": sizes}),
    "min available": ((), {"min_available_nodes": 4}, {}, {"metrics": sizes}),
    "server evaluation": ((), {}, {"evaluate_fn": evaluate_fn}, {}),
    "configs": ((), {}, {"train_config": {"lr": 0.3, "text": "a"}, "evaluate_config": {"b": 2}}, {}),
    "a client fails": ((), {"fraction_evaluate": 0.0}, {}, {"spoil": failing}),
    "all clients fail in one round": ((), {"fraction_evaluate": 0.0}, {}, {"spoil": lambda n, r, m: failing(1, r, m)}),
    "own metric functions": ((), {"train_metrics_aggr_fn": lambda contents, key: MetricRecord({"replies": len(contents)})}, {}, {}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_calls_arrays_metrics_and_log_equal_those_of_flowers_fedavg(case, flower_log):
    values, named, starting, client = SETTINGS[case]
    found = []
    for kind, more in ((FedAvg, {}), (mff.FedAvg, {"weighting": "samples"})):
        options = {key: ConfigRecord(value) if key.endswith("config") else value for key, value in starting.items()}
        toy = Recorded(**({"metrics": sizes} | client))
        result, lines = started(kind(*values, **named, **more), toy, flower_log, **options)
        found.append((sorted(toy.calls), result, significant(lines, kind.__name__)))
    (their_calls, theirs, their_lines), (our_calls, ours, our_lines) = found
    assert our_calls == their_calls
    np.testing.assert_allclose(ours.arrays["w"].numpy(), theirs.arrays["w"].numpy(), atol=1e-6)
    for kind in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        assert getattr(ours, kind).keys() == getattr(theirs, kind).keys()
        assert plain(getattr(ours, kind)) == {t: dict(record) for t, record in getattr(theirs, kind).items()}
    shape = [re.sub(r"[-\d.]+(e[-+]\d+)?", "#", line) for line in our_lines]
    assert shape == [re.sub(r"[-\d.]+(e[-+]\d+)?", "#", line) for line in their_lines]


SAMPLES = {
    "by position": ((0.25, 0.25, 3, 1, 4), {}, (3, 1)),
    "default minimum": ((), {"fraction_train": 0.0001, "fraction_evaluate": 0.0001}, (2, 2)),
    "rounded down": ((), {"fraction_train": 0.99, "fraction_evaluate": 0.76}, (3, 3)),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_as_many_clients_are_sampled_as_by_flower(case, flower_log):
    values, named, expected = SAMPLES[case]
    for kind in (FedAvg, mff.FedAvg):
        toy = Recorded()
        started(kind(*values, **named), toy, flower_log)
        asked = [(sent, dict(config)["server-round"]) for sent, _, config in toy.calls]
        for t in (1, 2, 3):
            assert (asked.count(("train", t)), asked.count(("evaluate", t))) == expected, kind


def test_the_first_round_waits_for_as_many_clients_as_under_flower(flower_log):
    """Two by default: a client that is alone waits for a second one, which joins later."""
    strategy, toy = mff.FedAvg(fraction_evaluate=0.0), Recorded()
    federation = mff.Federation(toy, 1)
    federation.clock.after(100.0, lambda: federation.join({"partition-id": 1, "num-partitions": 2}))
    with federation.running() as grid:
        strategy.start(grid, toy.initial(), 1, 20.0)
    assert [row["answered"] for row in strategy.rows] == [["0", "1"]]


def subclass(base, seen):
    """A strategy as apps write it: every hook overridden."""

    class Custom(base):
        def configure_train(self, server_round, arrays, config, grid):
            config["lr"] = 0.3 / server_round
            messages = list(super().configure_train(server_round, arrays, config, grid))
            seen.append(("configure_train", server_round, len(messages)))
            return messages[:3]

        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            shapes = sorted(tuple(a.shape) for reply in replies for a in reply.content["arrays"].values())
            seen.append(("aggregate_train", server_round, shapes))
            arrays, metrics = super().aggregate_train(server_round, replies)
            metrics["own"] = 1.0
            return arrays, metrics

        def configure_evaluate(self, server_round, arrays, config, grid):
            seen.append(("configure_evaluate", server_round, float(np.round(arrays["w"].numpy()[0] * 0, 3))))
            return super().configure_evaluate(server_round, arrays, config, grid)

        def aggregate_evaluate(self, server_round, replies):
            seen.append(("aggregate_evaluate", server_round, len(list(replies))))
            return super().aggregate_evaluate(server_round, replies)

        def summary(self):
            seen.append(("summary",))
            super().summary()

    return Custom


def test_overridden_methods_are_called_as_by_flower(flower_log):
    found = []
    for base, more in ((FedAvg, {}), (mff.FedAvg, {"weighting": "samples"})):
        seen = []
        result, _ = started(subclass(base, seen)(**more), Recorded(metrics=sizes), flower_log)
        found.append((seen, sorted(result.train_metrics_clientapp[2])))
    assert found[0] == found[1]
    assert found[0][0][0] == ("summary",)
    assert ("aggregate_train", 3, [(3,)] * 3) in found[0][0]


class OwnMessages(mff.FedAvg):
    """Builds its messages itself, without `super()`."""

    def configure_train(self, server_round, arrays, config, grid):
        content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": server_round})})
        return [Message(content, node, "train") for node in sorted(grid.get_node_ids())[:2]]


def test_messages_of_a_subclass_are_sent_and_their_replies_aggregated(flower_log):
    strategy = OwnMessages(fraction_evaluate=0.0, min_train_nodes=2)
    started(strategy, Recorded(), flower_log)
    assert [row["active"] for row in strategy.rows] == [2, 2, 2]


def test_evaluators_are_sampled_anew_every_round(flower_log):
    toy = Recorded()
    started(mff.FedAvg(fraction_evaluate=0.5, min_evaluate_nodes=1), toy, flower_log, rounds=8)
    chosen = [
        frozenset(n for kind, n, config in toy.calls if kind == "evaluate" and dict(config)["server-round"] == t) for t in range(1, 9)
    ]
    assert {len(each) for each in chosen} == {2}
    assert len(set(chosen)) > 2


def test_result_is_complete_after_a_restart(tmp_path, flower_log):
    def strategy(**more):
        return mff.FedAvg(weighting="samples", **more)

    whole, _ = started(strategy(), Recorded(metrics=sizes), flower_log, rounds=4, evaluate_fn=evaluate_fn)
    for rounds in (2, 4):
        resumed, _ = started(strategy(folder=tmp_path), Recorded(metrics=sizes), flower_log, rounds=rounds, evaluate_fn=evaluate_fn)
    assert str(resumed) == str(whole)
    assert sorted(resumed.evaluate_metrics_serverapp) == [0, 1, 2, 3, 4]


def quickstart():
    """Flower's PyTorch quickstart, in small: a network with BatchNorm, its state dict both ways."""
    import torch

    torch.manual_seed(0)

    def net():
        layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2)]
        return torch.nn.Sequential(*layers)

    first, client = net(), ClientApp()
    x = torch.randn(CLIENTS, 32, 4)
    y = (x.sum(dim=2) + torch.arange(CLIENTS)[:, None] > 1).long()

    @client.train()
    def train(message, context):
        number, model = context.node_config["partition-id"], net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"])
        for _ in range(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[number]), y[number])
            loss.backward()
            optimizer.step()
        metrics = MetricRecord({"train_loss": float(loss.detach()), "num-examples": 32})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    @client.evaluate()
    def evaluate(message, context):
        number, model = context.node_config["partition-id"], net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        model.eval()
        with torch.no_grad():
            right = float((model(x[number]).argmax(dim=1) == y[number]).float().mean())
        return Message(RecordDict({"metrics": MetricRecord({"accuracy": right, "num-examples": 32})}), reply_to=message)

    return client, ArrayRecord(first.state_dict())


@pytest.mark.parametrize("kind", [mff.FedAvg, mff.MimiC])
def test_the_pytorch_quickstart_with_batchnorm_runs_with_one_changed_line(kind, flower_log):
    """With everybody present, FedAvg and MimiC equal Flower's FedAvg; BatchNorm's counters stay integers."""
    results = []
    for strategy in (FedAvg, kind):
        client, arrays = quickstart()
        result, _ = started(strategy(), client, flower_log, arrays=arrays, train_config=ConfigRecord({"lr": 0.1}))
        results.append(result)
    theirs, ours = ({name: array.numpy() for name, array in result.arrays.items()} for result in results)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=2e-5, err_msg=name)
    assert ours["1.num_batches_tracked"].dtype == np.int64
    assert plain(results[1].evaluate_metrics_clientapp) == {t: dict(r) for t, r in results[0].evaluate_metrics_clientapp.items()}


def test_no_least_number_of_available_nodes():
    assert mff.FedAvg(min_available_nodes=0).wait_for == 1
