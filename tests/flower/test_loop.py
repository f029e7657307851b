"""The round loop: deadlines, enough answers, late ones, busy and vanished clients, and who is who."""

import time
from types import SimpleNamespace

import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

import mimicfl.flower as mff
from mimicfl.errors import UsageError
from mimicfl.flower.clock import Clock, SimulatedClock, clock_of
from mimicfl.flower.inline import Delayed
from mimicfl.flower.post import Sent
from mimicfl.flower.strategy import Asked

from .problems import LOCAL, N, app, federate, flat, model_arrays, participation, problem, simulated

BASE = {"fraction_evaluate": 0.0, "lr": LOCAL.lr, "wait_for": N}


class Unreliable:
    """The ready app, with something in the way: `trouble(client, t)` raises, or returns None (silence), "go on", or a delay."""

    def __init__(self, trouble):
        self.app, self.trouble = app(), trouble

    def __call__(self, node, message, context):
        if message.metadata.message_type != "train":
            return self.app(message, context)
        client, t = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]) - 1
        found = self.trouble(client, t)
        reply = self.app(message, context)
        return Delayed(reply, found) if isinstance(found, float) else reply if found == "go on" else None


def equals_the_simulator(strategy):
    return torch.equal(strategy.form.w, simulated("mimic", participation(strategy.rows)).params)


def test_a_round_closes_at_its_deadline_and_silence_is_named():
    strategy = mff.MimiC(**BASE)
    federate(strategy, 3, Unreliable(lambda c, t: None if (c, t) == (2, 1) else "go on"), timeout=1.0)
    rows = strategy.rows
    assert rows[1]["failed"] == {"2": "no answer in time"}
    assert rows[1]["answered"] == ["0", "1", "3", "4"]
    assert rows[2]["sent"] == ["0", "1", "3", "4"]  # client 2 still has a letter: it gets no second one
    assert equals_the_simulator(strategy)


def test_a_slow_machine_makes_no_client_miss_a_deadline():
    """Real seconds spent on training are not simulated ones, in our round loop and in Flower's own."""

    def slow(client, t):
        time.sleep(0.05)
        return "go on"

    strategy, theirs = mff.MimiC(**BASE), mff.MimiC(num_clients=N, **BASE)
    federate(strategy, 2, Unreliable(slow), timeout=0.01)
    assert participation(strategy.rows) == [[1] * N] * 2
    with mff.Federation(Unreliable(slow), N).running() as grid:
        Strategy.start(theirs, grid, model_arrays(problem()[2])[0], 2, 0.01)
    assert torch.equal(theirs.form.w, strategy.form.w)


@pytest.mark.parametrize("workers", [1, 3])
def test_delays_count_in_simulated_time_however_many_clients_train_at_once(workers):
    """Client 3 answers at its deadline and is counted; client 1 answers after it and is not."""
    delays = {(3, 0): 1.0, (1, 0): 1.01}
    strategy = mff.MimiC(**BASE)
    _, federation = federate(strategy, 1, Unreliable(lambda c, t: delays.get((c, t), "go on")), timeout=1.0, workers=workers)
    assert strategy.rows[0]["failed"] == {"1": "no answer in time"}
    assert federation.clock.now() == 1.0
    assert equals_the_simulator(strategy)


def test_flowers_own_loop_misses_only_delayed_answers():
    """Client 2's first answer comes after the deadline; the second round is complete."""
    strategy = mff.MimiC(num_clients=N, **BASE)
    with mff.Federation(Unreliable(lambda c, t: 4.0 if (c, t) == (2, 0) else "go on"), N).running() as grid:
        Strategy.start(strategy, grid, model_arrays(problem()[2])[0], 2, 3.0)
    assert torch.equal(strategy.form.w, simulated("mimic", [[1, 1, 0, 1, 1], [1] * N]).params)


def test_silent_clients_are_asked_again_when_their_message_has_expired():
    strategy = mff.MimiC(**BASE)
    _, federation = federate(strategy, 3, Unreliable(lambda c, t: None if t == 1 else "go on"), timeout=10.0)
    assert participation(strategy.rows) == [[1] * N, [0] * N, [1] * N]
    assert federation.clock.now() == 15.0  # the deadline, and the five seconds that a message outlives it
    assert equals_the_simulator(strategy)


def test_a_federation_that_can_only_wait_says_so():
    with pytest.raises(UsageError, match="no client has an answer to send"):
        federate(mff.MimiC(**(BASE | {"wait_for": 9})), 1)


def test_a_grid_is_used_while_its_clients_run():
    federation = mff.Federation(app(), N)
    with federation.running():
        pass
    with pytest.raises(UsageError, match=r"federation\.running"):
        mff.MimiC(**BASE).start(federation.grid, model_arrays(problem()[2])[0], 1)


def test_a_network_goes_by_the_clock_of_the_machine(monkeypatch):
    """Waits last one poll, or until the deadline if that is sooner."""
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
    assert isinstance(clock_of(mff.Federation(app(), 1).grid, 3.0), SimulatedClock)


def test_an_error_is_not_waited_for_and_says_why():
    def trouble(client, t):
        if (client, t) == (1, 1):
            raise RuntimeError("out of memory")
        return "go on"

    strategy = mff.MimiC(**BASE)
    _, federation = federate(strategy, 3, Unreliable(trouble), timeout=30.0)
    assert strategy.rows[1]["failed"] == {"1": "its app raised an error: RuntimeError: out of memory"}
    assert federation.clock.now() == 0
    assert participation(strategy.rows) == [[1] * 5, [1, 0, 1, 1, 1], [1] * 5]
    assert equals_the_simulator(strategy)


@pytest.mark.parametrize("enough", [4, 0.8])
def test_enough_answers_close_a_round(enough):
    strategy = mff.MimiC(enough=enough, **BASE)
    _, federation = federate(strategy, 2, Unreliable(lambda c, t: None if (c, t) == (4, 0) else "go on"), timeout=60.0)
    assert strategy.rows[0]["answered"] == ["0", "1", "2", "3"]
    assert strategy.rows[0]["failed"] == {"4": "the round had enough answers"}
    assert federation.clock.now() == 0


@pytest.mark.parametrize("policy", ["refuse", "count"])
def test_late_answers(policy):
    """Client 4's answer for round 0 arrives in round 1, in which it has not been asked and which waits for client 0."""
    delays = {(4, 0): 2.0, (0, 1): 1.0}
    strategy = mff.MimiC(late=policy, **BASE)
    federate(strategy, 3, Unreliable(lambda c, t: delays.get((c, t), "go on")), timeout=1.5)
    rows = strategy.rows
    assert rows[0]["failed"] == {"4": "no answer in time"}
    assert "4" not in rows[1]["sent"]
    if policy == "refuse":
        assert rows[1]["refused_late"] == {"4": 0}
        assert "4" not in rows[1]["answered"]
        assert rows[2]["answered"] == ["0", "1", "2", "3", "4"]
        assert equals_the_simulator(strategy)
    else:
        assert rows[1]["late"] == {"4": 0}
        assert rows[1]["answered"] == ["0", "1", "2", "3", "4"]  # it does not take the place of one who was asked


def test_a_late_answer_that_counts_is_measured_against_its_own_round():
    """Against w_0 and the rate of round 0, whatever the model has become."""
    strategy = mff.MimiC(late="count", **BASE)
    arrays, _ = model_arrays(problem()[2])
    strategy.begin(arrays)
    w0 = strategy.form.w.clone()
    question = Message(RecordDict({"arrays": arrays}), 7, "train")
    trained = {"arrays": strategy.form.layout.write(w0 - 0.25, {}), "metrics": MetricRecord({"num-examples": 3})}
    strategy.form.state.w = w0 + 100.0  # the model of a later round
    update = strategy.read(Sent(7, "4", "train", 0, Asked(0, w0, 0.5)), Message(RecordDict(trained), reply_to=question))
    torch.testing.assert_close(update.g, torch.full_like(w0, 0.5), atol=1e-6, rtol=0)


def test_a_client_that_comes_back_under_another_node_id_keeps_its_correction():
    """Killed while training, and back under a new node id while Flower still lists the old one."""
    moved = []

    def trouble(client, t):
        if (client, t) == (3, 1) and not moved:
            moved.append(federation.join({"partition-id": 3, "num-partitions": N}))
            return None
        return "go on"

    federation = mff.Federation(Unreliable(trouble), N)
    strategy = mff.MimiC(**BASE)
    with federation.running() as grid:
        strategy.start(grid, model_arrays(problem()[2])[0], 4, 30.0)
    assert strategy.rows[1]["failed"] == {"3": "it went away and came back"}
    assert federation.clock.now() == 0  # the dead node was not waited for
    assert participation(strategy.rows) == [[1] * 5, [1, 1, 1, 0, 1], [1] * 5, [1] * 5]
    assert strategy.form.clients == ["0", "1", "2", "3", "4"]
    assert equals_the_simulator(strategy)


def test_by_node_id_a_client_that_comes_back_is_another():
    nodes = []

    def moves(client, t):
        if (client, t) == (3, 1) and len(nodes) == 0:
            nodes.append(federation.join({"partition-id": 3, "num-partitions": N}))
            return None
        return "go on"

    federation = mff.Federation(Unreliable(moves), N)
    strategy = mff.MimiC(client_ids="node", **BASE)
    with federation.running() as grid:
        strategy.start(grid, model_arrays(problem()[2])[0], 3, 30.0)
    assert strategy.form.clients[-1] == f"node-{nodes[0]}"
    assert len(strategy.form.clients) == N + 1
    assert all(client.startswith("node-") for client in strategy.form.clients)


def test_an_app_that_does_not_say_who_it_is_goes_by_its_node_id():
    ready = app()
    strategy = mff.MimiC(**BASE)

    def mute(node, message, context):
        if message.metadata.message_type == "query":
            raise ValueError("No query function registered")
        reply = ready(message, context)
        del reply.content["mimicfl"]
        return reply

    federate(strategy, 2, mute)
    assert len(strategy.form.clients) == N
    assert all(client.startswith("node-") for client in strategy.form.clients)
    assert strategy.rows[1]["active"] == N


def test_a_greeting_that_failed_does_not_make_a_client_two():
    """Client 1's app breaks down at the greeting; its first answer tells its name, and from then on it is known by it."""
    ready, failed = app(), []

    def client(node, message, context):
        if message.metadata.message_type == "query" and context.node_config["partition-id"] == 1 and not failed:
            failed.append(node)
            raise RuntimeError("out of memory")
        return ready(message, context)

    strategy = mff.MIFA(num_clients=N, **BASE)
    federate(strategy, 3, client)
    assert sorted(strategy.form.clients) == ["0", "1", "2", "3", "4"]
    assert "it says now that it is client 1" in strategy.rows[0]["failed"][f"node-{failed[0]}"]
    assert participation(strategy.rows) == [[1, 0, 1, 1, 1], [1] * 5, [1] * 5]
    assert torch.equal(strategy.form.w, simulated("mifa", participation(strategy.rows)).params)


def test_nobody_there_is_said_and_bounded():
    with pytest.raises(UsageError, match=r"waited 0.3 s for 9 idle client\(s\), 5 are there"):
        federate(mff.MimiC(**(BASE | {"wait_for": 9, "patience": 0.3})), 1)


def test_a_population_that_is_full_refuses_the_next_by_name():
    strategy = mff.MIFA(num_clients=4, **BASE)
    federate(strategy, 1)
    assert strategy.rows[0]["failed"] == {"4": "it would be client 5 of 4"}
    assert strategy.rows[0]["active"] == 4


def test_the_population_may_grow_under_mimic():
    """Rows are added as clients appear; the result is that of a table made for all of them."""
    few = {"wait_for": 5, "fraction_train": 0.2}
    growing, known = mff.MimiC(**(BASE | few)), mff.MimiC(num_clients=N, **(BASE | few))
    for strategy in (growing, known):
        federate(strategy, 6)
    assert participation(growing.rows) == participation(known.rows)
    assert sum(map(sum, participation(growing.rows))) == 6
    assert len(growing.form.clients) > 2
    torch.testing.assert_close(growing.form.w, known.form.w, atol=1e-6, rtol=0)


def test_bytes_are_those_of_the_algorithm():
    """Vectors and bytes as the simulator counts them; SCAFFOLD's server holds the controls, so its clients send one, not two."""
    vector = 4 * simulated("mimic", [[1] * N]).params.numel()
    for name, up, down in (("FedAvg", 1, 1), ("MimiC", 1, 1), ("MIFA", 1, 1), ("FedProx", 1, 1), ("SCAFFOLD", 1, 2)):
        strategy = getattr(mff, name)(num_clients=N, **BASE)
        federate(strategy, 2)
        last = strategy.rows[-1]
        assert [last["vectors_up"], last["vectors_down"]] == [2 * N * up, 2 * N * down]
        assert [last["bytes_up"], last["bytes_down"]] == [2 * N * up * vector, 2 * N * down * vector]


def test_clients_evaluate_where_they_are_asked_to():
    strategy = mff.MimiC(**(BASE | {"fraction_evaluate": 1.0}))
    result, _ = federate(strategy, 2)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2]
    assert result.evaluate_metrics_clientapp[2]["loss"] > 0
    assert result.train_metrics_clientapp[2]["train-loss"] > 0


def test_the_server_evaluates_before_and_after_every_round():
    strategy = mff.MimiC(**BASE)
    seen = []
    federate(strategy, 2, evaluate_fn=lambda t, arrays: seen.append(flat(arrays)) or MetricRecord({"accuracy": 0.25 * t}))
    assert len(seen) == 3
    assert not torch.equal(seen[0], seen[1])
    assert [row["test_accuracy"] for row in strategy.rows] == [0.25, 0.5]
