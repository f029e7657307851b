"""Another node reports the id of a client: what is logged, who participates, and that no round waits for a node that is gone."""

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

import mimicfl as mf
import mimicfl.flower as mff
from mimicfl.flower.in_process import Delayed
from mimicfl.flower.replies import Update
from mimicfl.flower.server_form import ServerForm
from mimicfl.flower.wire import Layout
from tests.flower.problems import app, model_arrays, problem
from tests.flower.toy import Toy, run

OPTIONS = {"fraction_evaluate": 0.0, "lr": 0.3, "wait_for": 3, "max_norm": None}
TIMEOUT = 1000.0  # virtual seconds: a round that waits for its deadline is seen by the clock


def node_of(federation, number):
    return min(node for node, context in federation.contexts.items() if context.node_config["partition-id"] == number)


class Claimed(Toy):
    """A second node reports the id of client 0. In round `lost`, its own node goes offline while it has a request.

    In that round and in round `slow` the others take a second, so that the server has time to look at the nodes.
    """

    def __init__(self, lost=None, slow=None, **options):
        super().__init__(**options)
        self.lost, self.slow = lost, slow

    def join(self, federation):
        self.federation, self.node = federation, node_of(federation, 0)
        federation.join({"partition-id": 0, "num-partitions": 3})

    def __call__(self, node, message, context):
        reply = super().__call__(node, message, context)
        t = int(message.content["config"]["server-round"]) - 1 if message.metadata.message_type == "train" else None
        if t is None or t not in (self.lost, self.slow):
            return reply
        if t == self.lost and node == self.node:
            self.federation.clock.after(0.5, lambda: self.federation.leave(node))
            return None
        return Delayed(reply, 1.0)


ALL = ["0", "1", "2"]


def test_a_claim_is_ignored_and_logged_once_while_the_client_is_online(flower_log):
    toy = Claimed()
    run(strategy := mff.MimiC(**OPTIONS), toy, rounds=8, timeout=TIMEOUT, events={2: toy.join})
    assert flower_log.count("reports the id of client 0", "ignored while") == 1
    assert flower_log.count("reconnected") == 0
    assert [row["answered"] for row in strategy.rows] == [ALL] * 8


def test_the_claim_is_granted_and_logged_once_when_the_client_goes_offline(flower_log):
    """Its node is lost with a request in flight: that round does not wait for it, and the next one has the other node."""
    toy = Claimed(lost=5)
    run(strategy := mff.MimiC(**OPTIONS), toy, rounds=8, timeout=TIMEOUT, events={2: toy.join})
    assert flower_log.count("ignored while") == 1
    assert flower_log.count("client 0 reconnected") == 1
    assert [row["answered"] for row in strategy.rows] == [ALL] * 5 + [["1", "2"]] + [ALL] * 2
    assert strategy.rows[5]["failed"].keys() == {"0"}
    assert toy.federation.clock.now() < TIMEOUT
    assert strategy.form.clients == ALL


def test_a_node_that_reports_the_id_in_its_replies_only_takes_over_once_the_client_is_offline(flower_log):
    toy = Claimed(lost=5, hello=False, metrics=lambda number: {"num-examples": 1, "client-id": number})
    run(strategy := mff.MimiC(**OPTIONS), toy, rounds=8, timeout=TIMEOUT, events={2: toy.join})
    assert any("another node has that id" in why for row in strategy.rows[:5] for why in row["failed"].values())
    assert flower_log.count("client 0 reconnected") == 1
    assert [row["answered"] for row in strategy.rows] == [ALL] * 8
    assert toy.federation.clock.now() < TIMEOUT
    assert sorted(filter(None, strategy.form.clients)) == ALL


def test_a_client_that_answers_after_all_gets_its_id_back_and_it_is_logged_once(flower_log):
    """Its node was busy when another one reported its id, so that it was taken for dead."""
    toy = Claimed(slow=3)
    run(strategy := mff.MimiC(**OPTIONS), toy, rounds=8, timeout=TIMEOUT, events={3: toy.join})
    assert flower_log.count("client 0 reconnected") == 1
    assert flower_log.count("client 0 still runs") == 1
    assert [row["answered"] for row in strategy.rows] == [ALL] * 3 + [["1", "2"]] + [ALL] * 4


class DiesIdle(Toy):
    """The node of client 0 dies after its reply of round 2. Flower still lists it when the client is back on a new node."""

    dead = None

    def watch(self, federation):
        self.federation = federation

    def __call__(self, node, message, context):
        number, kind = context.node_config["partition-id"], message.metadata.message_type
        if (number, kind) == (2, "train") and message.content["config"]["server-round"] == 3:
            self.dead = node_of(self.federation, 0)
            self.federation.join({"partition-id": 0, "num-partitions": 3})
        return None if node == self.dead else super().__call__(node, message, context)


def test_a_client_that_was_idle_when_it_died_misses_no_round(flower_log):
    """Its old node is asked and does not answer, so that it gets no further request and no round waits for it."""
    toy = DiesIdle()
    run(strategy := mff.MimiC(**OPTIONS), toy, rounds=5, timeout=TIMEOUT, events={0: toy.watch})
    assert [row["answered"] for row in strategy.rows] == [ALL] * 5
    assert flower_log.count("client 0 reconnected") == 1
    assert toy.federation.clock.now() < TIMEOUT


def test_two_nodes_that_report_the_id_of_a_client_do_not_displace_it(flower_log):
    toy = Claimed()

    def join(federation):
        toy.join(federation)
        federation.join({"partition-id": 0, "num-partitions": 3})

    run(strategy := mff.MimiC(**OPTIONS), toy, rounds=5, timeout=TIMEOUT, events={2: join})
    assert flower_log.count("client 0 reconnected") == 0
    assert [row["answered"] for row in strategy.rows] == [ALL] * 5


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["setup", "share_keys", "collect_masked_vectors", "unmask"])
def test_a_secure_round_does_not_wait_for_a_client_that_restarted(tmp_path, stage):
    """The client is killed in the middle of a round and comes back under a new node id, which Flower lists beside the old one."""
    honest, moved = app(state=tmp_path), []

    def client(node, message, context):
        asked = dict(message.content.config_records.get("secaggplus_configs", {})).get("stage")
        if asked == stage and context.node_config["partition-id"] == 3 and message.metadata.group_id == "2" and not moved:
            moved.append(federation.join({"partition-id": 3, "num-partitions": 5}))
            return None
        return None if moved and node != moved[0] and context.node_config["partition-id"] == 3 else honest(message, context)

    federation = mff.Federation(client, 5)
    strategy = mff.MimiC(form=mff.SecureForm(threshold=0.51, clip=64.0), lr=0.05, fraction_evaluate=0.0, wait_for=5)
    with federation.running() as grid:
        strategy.start(grid, model_arrays(problem()[2])[0], 3, TIMEOUT)
    assert moved
    assert [row["active"] for row in strategy.rows] == [5, 5 if stage == "unmask" else 4, 5]
    assert federation.clock.now() < TIMEOUT
    assert stage == "unmask" or "restarted" in strategy.rows[1]["failed"]["3"]


SUMS = {
    mf.MIFA: ("total", "G"),
    mf.FedVARP: ("total", "y"),
    mf.FedStale: ("total", "y"),
    mf.SCAFFOLD: ("c", "c_i"),
    mf.MimiC: ("zero", "c"),
}


@pytest.mark.parametrize("kind", SUMS)
def test_sums_over_clients_stay_exact_when_a_new_client_gets_the_row_of_a_departed_one(kind):
    """The node of client 1 came back as client 3 before it was known to be gone, so that it has a row of its own. Later client 4 joins."""
    arrays = ArrayRecord(nn.Linear(3, 1).state_dict())
    form = ServerForm(kind(), num_clients=4)
    form.begin(Layout.of(arrays, ()), arrays)

    def train(t, **numbers):
        clients = {f"node-{name[1:]}": Update(g=torch.full((4,), number), K=1.0) for name, number in numbers.items()}
        form.request(t, list(clients))
        form.apply(t, clients, 0.1, 0.1)

    train(0, n1=1.0, n2=2.0)
    train(1, n2=2.0, n3=7.0)
    form.take_over("node-1", "node-3")
    train(2, n4=5.0)
    assert form.clients == ["node-4", "node-2", "node-3"]
    name, rows = SUMS[kind]
    mean = getattr(form.server.state, rows)[:].double().mean(dim=0)
    torch.testing.assert_close(getattr(form.server.state, name, torch.zeros(4)).double(), mean)
