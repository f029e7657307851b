"""Clients that come back under another node id: recognised where they report anything, and MimiC's corrections keep their sum."""

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

import mimicfl.flower as mff
from mimicfl.flower.in_process import Delayed
from tests.flower.toy import Toy, run

OPTIONS = {"fraction_evaluate": 0.0, "lr": 0.3}


def restarts(toy, times, rounds=(8, 14, 20), overlap=False):
    """Events: client 0 restarts under a new node id, and the old one leaves; with `overlap`, only some rounds later."""
    nodes = []

    def restart(federation):
        old = nodes[-1] if nodes else min(n for n, c in federation.contexts.items() if c.node_config["partition-id"] == 0)
        new = federation.join({"partition-id": 0, "num-partitions": 3})
        toy.target_of[new] = 0.0
        nodes.append(new)
        if not overlap:
            federation.leave(old)
        else:
            late.append(old)

    late = []
    events = dict.fromkeys(rounds[:times], restart)
    if overlap:
        events[rounds[0] + 3] = lambda federation: federation.leave(late[0])
    return events


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("num_clients", [None, 3])
def test_mimic_is_not_biased_by_clients_that_return_under_a_new_node_id(times, num_clients, flower_log):
    """Targets 0, 1, 2: the optimum is 1.0, also after client 0 was renamed; a lost correction would move it to 4/3."""
    toy = Toy(hello=False)
    strategy = mff.MimiC(num_clients=num_clients, wait_for=3, **OPTIONS)
    run(strategy, toy, rounds=60, events=restarts(toy, times))
    np.testing.assert_allclose(strategy.form.w, 1.0, atol=1e-3)
    rows = strategy.form.server.state.c
    torch.testing.assert_close(rows[:].sum(dim=0), torch.zeros(3), atol=1e-4, rtol=0)
    assert sum(map(bool, strategy.form.clients)) == 3
    assert flower_log.count("its correction passes to") == times  # once per restart


def test_mimic_is_not_biased_when_both_node_ids_are_listed_for_a_while():
    """Flower lists a dead node for up to a minute: meanwhile its client has a second row."""
    toy = Toy(hello=False)
    strategy = mff.MimiC(wait_for=3, **OPTIONS)
    dead = []

    def dies(number, reply, message):
        return None if message.metadata.dst_node_id in dead else reply

    toy.spoil = dies
    events = restarts(toy, 1, overlap=True)
    restart = events[8]

    def restart_and_die(federation):
        dead.append(min(n for n, c in federation.contexts.items() if c.node_config["partition-id"] == 0))
        restart(federation)

    run(strategy, toy, rounds=60, timeout=1.0, events=events | {8: restart_and_die})
    np.testing.assert_allclose(strategy.form.w, 1.0, atol=1e-3)
    assert sum(map(bool, strategy.form.clients)) == 3


@pytest.mark.parametrize("bad", ["\x1b[31m0", "0\n1", "x" * 200, "node-5", "", True, [1, 2], 0.5, b"0"])
def test_unusable_ids_are_replaced_by_the_node_id(bad):
    """Ids appear in rows, logs and file names."""

    class Odd(Toy):
        def __call__(self, node, message, context):
            if message.metadata.message_type == "query" and context.node_config["partition-id"] == 0:
                self.node = node
                return Message(RecordDict({"mimicfl": ConfigRecord({"client-id": bad})}), reply_to=message)
            return super().__call__(node, message, context)

    toy, strategy = Odd(), mff.MimiC(wait_for=3, **OPTIONS)
    run(strategy, toy, rounds=2)
    assert [row["answered"] for row in strategy.rows] == [["1", "2", f"node-{toy.node}"]] * 2


def test_a_node_that_is_reported_offline_is_not_selected_again(flower_log):
    """Nodes are listed less often than replies are polled: Flower's error reply is newer than the list."""
    toy, dead = Toy(hello=False), []

    def dies(number, reply, message):
        if number == 0 and not dead and message.content["config"]["server-round"] == 3:
            dead.append(message.metadata.dst_node_id)
            federation.join({"partition-id": 0, "num-partitions": 3})
            federation.leave(dead[0])
        return None if message.metadata.dst_node_id in dead else reply

    toy.spoil = dies
    federation = mff.Federation(toy, 3)
    federation.clock.poll = 1.0  # the list of nodes is up to 5 s old, in virtual time
    strategy = mff.MimiC(wait_for=3, **OPTIONS)
    with federation.running() as grid:
        strategy.start(grid, toy.initial(), 6, 1000.0)
    client = f"node-{dead[0]}"
    assert strategy.rows[2]["failed"] == {client: "its node is offline"}
    assert all(client not in row["sent"] for row in strategy.rows[3:])
    assert strategy.rows[-1]["active"] == 3
    assert flower_log.count("its correction passes to") == 1


@pytest.mark.parametrize("kind", [mff.MIFA, mff.FedVARP])
def test_with_num_clients_a_returning_node_takes_over_its_row(kind):
    toy = Toy(hello=False)
    strategy = kind(num_clients=3, wait_for=3, **OPTIONS)
    run(strategy, toy, rounds=60, events=restarts(toy, 1))
    np.testing.assert_allclose(strategy.form.w, 1.0, atol=1e-3)
    assert [row["active"] for row in strategy.rows][-1] == 3


@pytest.mark.parametrize("key", ["client-id", "partition_id"])
def test_apps_that_report_an_id_in_their_metrics_are_recognised(key):
    toy = Toy(hello=False, metrics=lambda number: {"num-examples": 1, key: number})
    strategy = mff.MimiC(wait_for=3, **OPTIONS)
    run(strategy, toy, rounds=30, events=restarts(toy, 1))
    assert sorted(filter(None, strategy.form.clients)) == ["0", "1", "2"]
    assert [row["active"] for row in strategy.rows][:3] == [3, 3, 3]
    np.testing.assert_allclose(strategy.form.w, 1.0, atol=1e-2)


def test_availability_patterns_select_clients_that_do_not_report_ids():
    strategy = mff.MimiC(availability="static:0.5", num_clients=3, **OPTIONS)
    run(strategy, Toy(hello=False), rounds=12)
    selected = [len(row["sent"]) for row in strategy.rows]
    assert 0 < sum(selected) < 36
    assert [row["active"] for row in strategy.rows] == selected


def impostor(federation, number):
    """A node that reports another client's id."""
    return federation.join({"partition-id": number, "num-partitions": 3})


@pytest.mark.parametrize("busy", [False, True])
def test_a_node_that_reports_the_id_of_a_connected_client_does_not_displace_it(busy):
    """The second node's target is 100: if it stood in for client 0, the model would end far from 1. A busy client may lose one round."""
    toy = Toy()
    joined = []

    def join(federation):
        joined.append(impostor(federation, 0))
        toy.target_of[joined[0]] = 100.0

    def spoil(number, reply, message):
        t = message.content["config"]["server-round"] if message.metadata.message_type == "train" else 0
        late = busy and joined and number == 0 and t == 3 and message.metadata.dst_node_id != joined[0]
        return Delayed(reply, 1.0 if late else 0.4) if busy and t else reply  # so that time passes

    toy.spoil = spoil
    strategy = mff.MimiC(wait_for=3, max_norm=None, **OPTIONS)
    run(strategy, toy, rounds=60, events={2: join} if busy else {3: join})
    assert [row["answered"] for row in strategy.rows][10:] == [["0", "1", "2"]] * 50
    np.testing.assert_allclose(strategy.form.w, 1.0, atol=1e-2)
