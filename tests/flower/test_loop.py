"""The round loop: deadlines, enough answers, late ones, busy and vanished clients, and who is who."""

import threading

import pytest
import torch
from flwr.app import Message

import mimicfl.flower as mff
from mimicfl.errors import UsageError

from .problems import LOCAL, N, app, federate, flat, simulated

BASE = {"fraction_evaluate": 0.0, "lr": LOCAL.lr, "wait_for": N, "poll": 0.005}


class Unreliable:
    """The ready app, with something in the way: `trouble(client, round, message)` may return a reply, None (silence) or "go on"."""

    def __init__(self, trouble):
        self.app, self.trouble, self.trained = app(), trouble, []

    def __call__(self, node, message, context):
        if message.metadata.message_type != "train":
            return self.app(message, context)
        client, t = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]) - 1
        self.trained.append((t, client))
        found = self.trouble(client, t, message)
        return self.app(message, context) if found == "go on" else found


def rows_of(strategy, rounds, client, **options):
    """Run, and look at what the loop wrote down."""
    kept = []
    from mimicfl.flower import loop

    original = loop.Journal.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Journal, "add", lambda self, row: (kept.append(row), original(self, row)))
        result, federation = federate(strategy, rounds, client, **options)
    return kept, result, federation


def participation(rows):
    return [[int(str(i) in row["answered"]) for i in range(N)] for row in rows]


def test_a_round_closes_at_its_deadline_and_silence_is_named():
    rows, result, _ = rows_of(mff.MimiC(**BASE), 3, Unreliable(lambda c, t, m: None if (c, t) == (2, 1) else "go on"), timeout=1.0)
    assert rows[1]["failed"] == {"2": "no answer in time"}
    assert rows[1]["answered"] == ["0", "1", "3", "4"]
    assert rows[2]["sent"] == ["0", "1", "3", "4"]  # client 2 still has a letter: it gets no second one
    assert torch.equal(flat(result.arrays), simulated("mimic", participation(rows)).params)


def test_an_error_is_not_waited_for_and_says_why():
    def trouble(client, t, message):
        if (client, t) == (1, 1):
            raise RuntimeError("out of memory")
        return "go on"

    rows, result, _ = rows_of(mff.MimiC(**BASE), 3, Unreliable(trouble), timeout=30.0)
    assert rows[1]["failed"] == {"1": "its app raised an error: RuntimeError: out of memory"}
    assert rows[1]["seconds"] < 10
    assert participation(rows) == [[1] * 5, [1, 0, 1, 1, 1], [1] * 5]
    assert torch.equal(flat(result.arrays), simulated("mimic", participation(rows)).params)


def test_enough_answers_close_a_round():
    gate = threading.Event()

    def trouble(client, t, message):
        if t == 0 and client == 4:
            gate.wait(20)
        elif t == 1:
            gate.set()
        return "go on"

    client = Unreliable(trouble)
    federation_options = {"timeout": 30.0}
    rows, _, _ = rows_of(mff.MimiC(enough=4, **BASE), 2, client, **federation_options)
    assert len(rows[0]["answered"]) == 4
    assert set(rows[0]["failed"].values()) == {"the round had enough answers"}


@pytest.mark.parametrize("policy", ["refuse", "count"])
def test_late_answers(policy):
    """Client 4's answer for round 0 arrives in round 1; its update is measured against the model of round 0."""
    gate, seen = threading.Event(), []

    def trouble(client, t, message):
        if (client, t) == (4, 0):
            gate.wait(20)
        if t == 1 and client == 0:
            gate.set()
            threading.Event().wait(0.5)  # round 1 is still open when the late answer comes
        seen.append((t, client))
        return "go on"

    strategy = mff.MimiC(late=policy, **BASE)
    from . import problems

    arrays, _ = problems.model_arrays(problems.problem()[2])
    federation = mff.Federation(Unreliable(trouble), N)
    kept = []
    with pytest.MonkeyPatch.context() as patch, federation.running(workers=3) as grid:
        from mimicfl.flower import loop

        original = loop.Journal.add
        patch.setattr(loop.Journal, "add", lambda self, row: (kept.append(row), original(self, row)))
        strategy.start(grid, arrays, 3, 1.5)
    assert kept[0]["failed"] == {"4": "no answer in time"}
    assert "4" not in kept[1]["sent"]
    if policy == "refuse":
        assert kept[1]["refused_late"] == {"4": 0}
        assert "4" not in kept[1]["answered"]
        assert kept[2]["answered"] == ["0", "1", "2", "3", "4"]
        expected = simulated("mimic", participation(kept)).params
        assert torch.equal(strategy.form.w, expected)
    else:
        assert kept[1]["late"] == {"4": 0}
        assert "4" in kept[1]["answered"]


def test_a_late_answer_that_counts_is_measured_against_its_own_round():
    """From w_0, by hand: g of round 0 at the rate of round 0, whatever the model has become."""
    from mimicfl.flower.post import Sent
    from mimicfl.flower.strategy import Asked

    from .problems import model_arrays, problem

    strategy = mff.MimiC(late="count", **BASE)
    arrays, _ = model_arrays(problem()[2])
    strategy.begin(arrays)
    w0 = strategy.form.w.clone()
    trained = strategy.form.layout.write(w0 - 0.25, {})
    from flwr.app import MetricRecord, RecordDict

    question = Message(RecordDict({"arrays": arrays}), 7, "train")
    reply = Message(RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": 3})}), reply_to=question)
    strategy.form.state.w = w0 + 100.0  # the model of a later round
    update = strategy.read(Sent(7, "4", "train", 0, Asked(0, w0, 0.5)), reply)
    torch.testing.assert_close(update.g, torch.full_like(w0, 0.5), atol=1e-6, rtol=0)


def test_a_client_that_comes_back_under_another_node_id_keeps_its_correction():
    """Node ids change; the client id does not, and neither does c_i."""
    client = Unreliable(lambda c, t, m: "go on")
    strategy = mff.MimiC(**BASE)
    arrays = None
    federation = mff.Federation(client, N)
    from .problems import model_arrays, problem

    arrays, _ = model_arrays(problem()[2])
    moved = {}

    def move(client_number, t, message):
        if (client_number, t) == (3, 1) and not moved:
            node = next(n for n, c in federation.contexts.items() if c.node_config["partition-id"] == 3)
            moved["from"], moved["to"] = node, federation.join({"partition-id": 3, "num-partitions": N})
            return None  # killed while training: no word
        return "go on"

    client.trouble = move
    kept = []
    from mimicfl.flower import loop

    original = loop.Journal.add
    with pytest.MonkeyPatch.context() as patch, federation.running() as grid:
        patch.setattr(loop.Journal, "add", lambda self, row: (kept.append(row), original(self, row)))
        strategy.start(grid, arrays, 4, 30.0)
    assert kept[1]["failed"] == {"3": "it went away and came back"}
    assert kept[1]["seconds"] < 15  # the dead node was not waited for
    assert participation(kept) == [[1] * 5, [1, 1, 1, 0, 1], [1] * 5, [1] * 5]
    assert strategy.form.clients == ["0", "1", "2", "3", "4"]
    assert torch.equal(strategy.form.w, simulated("mimic", participation(kept)).params)


def test_nobody_there_is_said_and_bounded():
    with pytest.raises(UsageError, match=r"waited 0.3 s for 9 idle client\(s\), 5 are there"):
        federate(mff.MimiC(**(BASE | {"wait_for": 9, "patience": 0.3})), 1)


def test_a_population_that_is_full_refuses_the_next_by_name():
    rows, _, _ = rows_of(mff.MIFA(num_clients=4, **(BASE | {"wait_for": 5})), 1, None)
    assert list(rows[0]["failed"].values()) == ["it would be client 5 of 4"]
    assert rows[0]["active"] == 4


def test_mean_over_everybody_needs_to_know_how_many():
    with pytest.raises(UsageError, match="num_clients=N"):
        mff.SCAFFOLD()


def test_the_population_may_grow_under_mimic():
    strategy = mff.MimiC(**(BASE | {"wait_for": 1, "fraction_train": 0.2}))
    federate(strategy, 6)
    full = mff.MimiC(num_clients=N, **(BASE | {"wait_for": N, "fraction_train": 0.2}))
    federate(full, 6)
    assert len(strategy.form.state.c) >= len(strategy.form.clients) > 1
    assert bool(torch.isfinite(strategy.form.w).all())


def test_bytes_are_those_of_the_algorithm():
    """Vectors up and down, and their bytes, as the simulator counts them; SCAFFOLD's server holds the controls: one up."""
    for name, up, down in (("FedAvg", 1, 1), ("MimiC", 1, 1), ("MIFA", 1, 1), ("FedProx", 1, 1), ("SCAFFOLD", 1, 2)):
        rows, _, _ = rows_of(getattr(mff, name)(num_clients=N, **BASE), 2, None)
        vector = 4 * simulated("mimic", [[1] * N]).params.numel()
        assert rows[-1]["vectors_up"] == 2 * N * up
        assert rows[-1]["vectors_down"] == 2 * N * down
        assert rows[-1]["bytes_up"] == 2 * N * up * vector
        assert rows[-1]["bytes_down"] == 2 * N * down * vector
