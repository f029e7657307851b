"""The round loop: deadlines, early closing, late replies, busy and offline clients, and client ids."""

import time
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

import mimicfl.flower as mff
from mimicfl.errors import UsageError
from mimicfl.flower.clock import Clock, VirtualClock, clock_of
from mimicfl.flower.in_process import Delayed
from mimicfl.flower.messages import RoundRequest, SentMessage
from tests.flower.problems import LOCAL, N, app, federate, flat, model_arrays, participation, problem, simulated

BASE = {"fraction_evaluate": 0.0, "lr": LOCAL.lr, "wait_for": N}


class Unreliable:
    """A client app with failures: `failure(client, t)` raises, or returns None (no reply), "ok", or a delay in seconds."""

    def __init__(self, failure):
        self.app, self.failure = app(), failure

    def __call__(self, node, message, context):
        if message.metadata.message_type != "train":
            return self.app(message, context)
        client, t = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]) - 1
        outcome = self.failure(client, t)
        reply = self.app(message, context)
        return Delayed(reply, outcome) if isinstance(outcome, float) else reply if outcome == "ok" else None


def failed_with(row, text):
    """Clients of a row whose reason contains this text; all failures must have it."""
    assert all(text in why for why in row["failed"].values()), row["failed"]
    return list(row["failed"])


def equals_the_simulator(strategy):
    return torch.equal(strategy.form.w, simulated("mimic", participation(strategy.rows)).params)


def test_round_closes_at_its_deadline_and_records_missing_clients():
    strategy = mff.MimiC(**BASE)
    federate(strategy, 3, Unreliable(lambda c, t: None if (c, t) == (2, 1) else "ok"), timeout=1.0)
    rows = strategy.rows
    assert failed_with(rows[1], "deadline") == ["2"]
    assert rows[1]["answered"] == ["0", "1", "3", "4"]
    assert rows[2]["sent"] == ["0", "1", "3", "4"]  # client 2 is busy: its first message is still in flight
    assert equals_the_simulator(strategy)


@pytest.mark.slow
def test_slow_training_does_not_miss_simulated_deadlines():
    """Training takes no virtual time, in mimicfl's round loop and in Flower's."""

    def slow(client, t):
        time.sleep(0.05)
        return "ok"

    strategy, theirs = mff.MimiC(**BASE), mff.MimiC(num_clients=N, **BASE)
    federate(strategy, 2, Unreliable(slow), timeout=0.01)
    assert participation(strategy.rows) == [[1] * N] * 2
    with mff.Federation(Unreliable(slow), N).running() as grid:
        Strategy.start(theirs, grid, model_arrays(problem()[2])[0], 2, 0.01)
    torch.testing.assert_close(theirs.form.w, strategy.form.w, atol=3e-6, rtol=0)


@pytest.mark.parametrize("workers", [1, 3])
def test_delays_are_in_simulated_time_for_any_number_of_workers(workers):
    """Client 3 replies at the deadline and is aggregated; client 1 replies after it and is not."""
    delays = {(3, 0): 1.0, (1, 0): 1.01}
    strategy = mff.MimiC(**BASE)
    _, federation = federate(strategy, 1, Unreliable(lambda c, t: delays.get((c, t), "ok")), timeout=1.0, workers=workers)
    assert failed_with(strategy.rows[0], "deadline") == ["1"]
    assert federation.clock.now() == 1.0
    assert equals_the_simulator(strategy)


def test_flowers_own_loop_misses_only_delayed_replies():
    """Client 2's first reply arrives after the deadline; the second round is complete."""
    strategy = mff.MimiC(num_clients=N, **BASE)
    with mff.Federation(Unreliable(lambda c, t: 4.0 if (c, t) == (2, 0) else "ok"), N).running() as grid:
        Strategy.start(strategy, grid, model_arrays(problem()[2])[0], 2, 3.0)
    torch.testing.assert_close(strategy.form.w, simulated("mimic", [[1, 1, 0, 1, 1], [1] * N]).params, atol=3e-6, rtol=0)


def test_clients_are_selected_again_after_their_message_expires():
    strategy = mff.MimiC(**BASE)
    _, federation = federate(strategy, 3, Unreliable(lambda c, t: None if t == 1 else "ok"), timeout=10.0)
    assert participation(strategy.rows) == [[1] * N, [0] * N, [1] * N]
    assert federation.clock.now() == 15.0  # the deadline plus the five seconds after which messages expire
    assert equals_the_simulator(strategy)


def test_waiting_without_pending_replies_raises():
    with pytest.raises(UsageError, match="wait_for"):
        federate(mff.MimiC(**(BASE | {"wait_for": 9})), 1)


def test_starting_outside_running_raises():
    federation = mff.Federation(app(), N)
    with federation.running():
        pass
    with pytest.raises(UsageError, match=r"federation\.running"):
        mff.MimiC(**BASE).start(federation.grid, model_arrays(problem()[2])[0], 1)


def test_real_clock_waits_one_poll_or_until_the_deadline(monkeypatch):
    """On a network grid, a wait lasts one poll interval, or until the deadline if that is sooner."""
    times = SimpleNamespace(now=100.0, slept=[])

    def sleep(seconds):
        times.slept.append(seconds)
        times.now += seconds

    monkeypatch.setattr("mimicfl.flower.clock.time", SimpleNamespace(monotonic=lambda: times.now, sleep=sleep))
    clock = clock_of(SimpleNamespace(), None)
    assert type(clock) is Clock
    assert [clock.wait(100.5) for _ in range(4)] == [True, True, True, False]
    assert times.slept == pytest.approx([0.2, 0.2, 0.1])
    assert clock_of(SimpleNamespace(), 3.0).wait()
    assert times.slept[-1] == 3.0
    assert isinstance(clock_of(mff.Federation(app(), 1).grid, 3.0), VirtualClock)


def test_client_error_is_recorded_without_waiting_for_the_deadline():
    def failure(client, t):
        if (client, t) == (1, 1):
            raise RuntimeError("out of memory")
        return "ok"

    strategy = mff.MimiC(**BASE)
    _, federation = federate(strategy, 3, Unreliable(failure), timeout=30.0)
    assert failed_with(strategy.rows[1], "RuntimeError: out of memory") == ["1"]
    assert federation.clock.now() == 0
    assert participation(strategy.rows) == [[1] * 5, [1, 0, 1, 1, 1], [1] * 5]
    assert equals_the_simulator(strategy)


@pytest.mark.parametrize("enough", [4, 0.8])
def test_round_closes_after_enough_replies(enough):
    strategy = mff.MimiC(enough=enough, **BASE)
    _, federation = federate(strategy, 2, Unreliable(lambda c, t: None if (c, t) == (4, 0) else "ok"), timeout=60.0)
    assert strategy.rows[0]["answered"] == ["0", "1", "2", "3"]
    assert failed_with(strategy.rows[0], "enough") == ["4"]
    assert federation.clock.now() == 0


@pytest.mark.parametrize("policy", ["refuse", "count"])
def test_late_replies_are_refused_or_counted(policy):
    """Client 4's reply for round 0 arrives in round 1, which did not select it and waits for client 0."""
    delays = {(4, 0): 2.0, (0, 1): 1.0}
    strategy = mff.MimiC(late=policy, **BASE)
    federate(strategy, 3, Unreliable(lambda c, t: delays.get((c, t), "ok")), timeout=1.5)
    rows = strategy.rows
    assert failed_with(rows[0], "deadline") == ["4"]
    assert "4" not in rows[1]["sent"]
    if policy == "refuse":
        assert rows[1]["refused_late"] == {"4": 0}
        assert "4" not in rows[1]["answered"]
        assert rows[2]["answered"] == ["0", "1", "2", "3", "4"]
        assert equals_the_simulator(strategy)
    else:
        assert rows[1]["late"] == {"4": 0}
        assert rows[1]["answered"] == ["0", "1", "2", "3", "4"]  # it does not replace a client of this round


def test_counted_late_reply_is_compared_with_the_model_of_its_round():
    """Uses w_0 and the learning rate of round 0, not the current model."""
    strategy = mff.MimiC(late="count", **BASE)
    arrays, _ = model_arrays(problem()[2])
    strategy.begin(arrays)
    w0 = strategy.form.w.clone()
    request = Message(RecordDict({"arrays": arrays}), 7, "train")
    trained = {"arrays": strategy.form.layout.write(w0 - 0.25, {}), "metrics": MetricRecord({"num-examples": 3})}
    strategy.form.server.state.w = w0 + 100.0  # the model of a later round
    update = strategy.read(SentMessage(7, "4", "train", 0, RoundRequest(0, w0, 0.5)), Message(RecordDict(trained), reply_to=request))
    torch.testing.assert_close(update.g, torch.full_like(w0, 0.5), atol=1e-6, rtol=0)


def test_client_with_a_new_node_id_keeps_its_correction():
    """A client is killed while training and reconnects under a new node id while Flower still lists the old one."""
    moved = []

    def failure(client, t):
        if (client, t) == (3, 1) and not moved:
            moved.append(federation.join({"partition-id": 3, "num-partitions": N}))
            return None
        return "ok"

    federation = mff.Federation(Unreliable(failure), N)
    strategy = mff.MimiC(**BASE)
    with federation.running() as grid:
        strategy.start(grid, model_arrays(problem()[2])[0], 4, 30.0)
    assert failed_with(strategy.rows[1], "restarted") == ["3"]
    assert federation.clock.now() == 0  # the round did not wait for the dead node
    assert participation(strategy.rows) == [[1] * 5, [1, 1, 1, 0, 1], [1] * 5, [1] * 5]
    assert strategy.form.clients == ["0", "1", "2", "3", "4"]
    assert equals_the_simulator(strategy)


def test_with_client_ids_node_a_restarted_client_is_a_new_client():
    nodes = []

    def moves(client, t):
        if (client, t) == (3, 1) and len(nodes) == 0:
            nodes.append(federation.join({"partition-id": 3, "num-partitions": N}))
            return None
        return "ok"

    federation = mff.Federation(Unreliable(moves), N)
    strategy = mff.MimiC(client_ids="node", **BASE)
    with federation.running() as grid:
        strategy.start(grid, model_arrays(problem()[2])[0], 3, 30.0)
    assert strategy.form.clients[-1] == f"node-{nodes[0]}"
    assert len(strategy.form.clients) == N + 1
    assert all(client.startswith("node-") for client in strategy.form.clients)


def test_app_without_an_id_is_identified_by_its_node_id():
    complete = app()
    strategy = mff.MimiC(**BASE)

    def without_id(node, message, context):
        if message.metadata.message_type == "query":
            raise ValueError("No query function registered")
        reply = complete(message, context)
        del reply.content["mimicfl"]
        return reply

    federate(strategy, 2, without_id)
    assert len(strategy.form.clients) == N
    assert all(client.startswith("node-") for client in strategy.form.clients)
    assert strategy.rows[1]["active"] == N


def test_failed_id_query_does_not_create_a_second_client():
    """Client 1 fails at the id query; its first training reply reports its id, under which it is aggregated."""
    complete, failed = app(), []

    def client(node, message, context):
        if message.metadata.message_type == "query" and context.node_config["partition-id"] == 1 and not failed:
            failed.append(node)
            raise RuntimeError("out of memory")
        return complete(message, context)

    strategy = mff.MIFA(num_clients=N, **BASE)
    federate(strategy, 3, client)
    assert sorted(strategy.form.clients) == ["0", "1", "2", "3", "4"]
    assert len(failed) == 1
    assert participation(strategy.rows) == [[1] * 5] * 3
    assert torch.equal(strategy.form.w, simulated("mifa", participation(strategy.rows)).params)


def test_waiting_for_clients_is_bounded_by_patience():
    with pytest.raises(UsageError, match=r"waited 0.3 s for 9 .*only 5 "):
        federate(mff.MimiC(**(BASE | {"wait_for": 9, "patience": 0.3})), 1)


def test_client_beyond_num_clients_is_refused():
    strategy = mff.MIFA(num_clients=4, **BASE)
    federate(strategy, 1)
    assert failed_with(strategy.rows[0], "num_clients=4") == ["4"]
    assert strategy.rows[0]["active"] == 4


def test_mimic_accepts_new_clients():
    """Rows are added when clients join; the result equals that with all rows allocated from the start."""
    few = {"wait_for": 5, "fraction_train": 0.2, "min_train_nodes": 1}
    growing, known = mff.MimiC(**(BASE | few)), mff.MimiC(num_clients=N, **(BASE | few))
    for strategy in (growing, known):
        federate(strategy, 6)
    assert participation(growing.rows) == participation(known.rows)
    assert sum(map(sum, participation(growing.rows))) == 6
    assert len(growing.form.clients) > 2
    torch.testing.assert_close(growing.form.w, known.form.w, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_traffic_matches_the_algorithm():
    """Vectors and bytes as counted by the simulator, except that SCAFFOLD's clients upload one vector: the server holds the controls."""
    vector = 4 * simulated("mimic", [[1] * N]).params.numel()
    for name, up, down in (("FedAvg", 1, 1), ("MimiC", 1, 1), ("MIFA", 1, 1), ("FedProx", 1, 1), ("SCAFFOLD", 1, 2)):
        strategy = getattr(mff, name)(num_clients=N, **BASE)
        federate(strategy, 2)
        last = strategy.rows[-1]
        assert [last["vectors_up"], last["vectors_down"]] == [2 * N * up, 2 * N * down]
        assert [last["bytes_up"], last["bytes_down"]] == [2 * N * up * vector, 2 * N * down * vector]


def test_federated_evaluation_returns_client_metrics():
    strategy = mff.MimiC(**(BASE | {"fraction_evaluate": 1.0}))
    result, _ = federate(strategy, 2)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2]
    assert result.evaluate_metrics_clientapp[2]["loss"] > 0
    assert result.train_metrics_clientapp[2]["train-loss"] > 0


def test_server_evaluates_before_the_first_round_and_after_every_round():
    strategy = mff.MimiC(**BASE)
    seen = []
    federate(strategy, 2, evaluate_fn=lambda t, arrays: seen.append(flat(arrays)) or MetricRecord({"accuracy": 0.25 * t}))
    assert len(seen) == 3
    assert not torch.equal(seen[0], seen[1])
    assert [row["test_accuracy"] for row in strategy.rows] == [0.25, 0.5]
