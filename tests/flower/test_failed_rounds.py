"""Runs that learn nothing fail, with the reasons: rounds in a row, the whole run, in Flower's own loop, and after a restart."""

from functools import partial

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import Strategy

import mimicfl as mf
import mimicfl.flower as mff
from mimicfl import algorithms
from mimicfl.errors import UsageError
from mimicfl.flower.failed_rounds import NothingLearned
from tests.flower.attacks import ATTACKS
from tests.flower.problems import app, model_arrays, problem
from tests.flower.toy import Toy, run

OPTIONS = {"fraction_evaluate": 0.0, "lr": 0.3, "wait_for": 3}


def failing(rounds):
    """Clients that raise in these rounds."""

    def spoil(number, reply, message):
        if int(message.content["config"]["server-round"]) - 1 in rounds:
            raise RuntimeError("out of memory")
        return reply

    return Toy(spoil=spoil)


def test_the_run_fails_after_three_failed_rounds_in_a_row_with_the_reason():
    strategy = mff.MimiC(**OPTIONS)
    with pytest.raises(NothingLearned, match=r"3 rounds in a row.*out of memory"):
        run(strategy, failing(range(2, 9)), rounds=10)
    assert [row["active"] for row in strategy.rows] == [3, 3, 0, 0, 0]


def test_a_successful_round_in_between_keeps_the_run_alive():
    strategy = mff.MimiC(failed_rounds=2, **OPTIONS)
    run(strategy, failing([1, 3, 5]), rounds=7)
    assert [row["active"] for row in strategy.rows] == [3, 0, 3, 0, 3, 0, 3]


def test_a_short_run_without_a_successful_round_fails_at_its_end():
    with pytest.raises(NothingLearned, match=r"whole run.*out of memory"):
        run(mff.FedAvg(**OPTIONS), failing(range(9)), rounds=2)


NOBODY = mf.availability.Explicit(np.zeros((5, 3), dtype=bool))


def test_a_run_in_which_nobody_ever_participated_fails_at_its_end(tmp_path):
    """Rounds without a client are not failed rounds, so all are run."""
    strategy = mff.FedAvg(availability=NOBODY, num_clients=3, folder=tmp_path, **OPTIONS)
    with pytest.raises(NothingLearned, match=r"no client was selected in any of the 5 rounds; .*availability"):
        run(strategy, Toy(), rounds=5)
    assert [row["sent"] for row in strategy.rows] == [[]] * 5
    assert not (tmp_path / "final.safetensors").exists()
    run(mff.FedAvg(availability=NOBODY, num_clients=3, failed_rounds=None, **OPTIONS), Toy(), rounds=5)


def test_a_run_that_failed_continues_once_the_cause_is_removed(tmp_path):
    with pytest.raises(NothingLearned):
        run(mff.MimiC(folder=tmp_path, **OPTIONS), failing(range(1, 9)), rounds=6)
    strategy = mff.MimiC(folder=tmp_path, **OPTIONS)
    run(strategy, failing(()), rounds=6)
    assert [row["active"] for row in strategy.rows] == [3, 0, 0, 0, 3, 3]


@pytest.mark.parametrize("form", ["server", "client", "secure"])
def test_rounds_below_min_counted_leave_the_model_unchanged(tmp_path, form):
    """Four of five clients reply in the last two rounds, one fewer than required."""
    honest = app(state=tmp_path)

    def client(node, message, context):
        group = message.metadata.group_id
        return None if context.node_config["partition-id"] == 1 and group in ("2", "3") else honest(message, context)

    forms = {"client": mff.ClientForm, "secure": partial(mff.SecureForm, threshold=0.51, clip=64.0)}
    more = {"form": forms[form]()} if form in forms else {}
    options = {"fraction_evaluate": 0.0, "lr": 0.05, "wait_for": 5, "min_counted": 5, "failed_rounds": 2}
    strategy, models = mff.MimiC(**options, **more), []
    federation = mff.Federation(client, 5)
    with federation.running() as grid, pytest.raises(NothingLearned, match=r"fewer than 5 update.*2 rounds in a row"):
        strategy.start(grid, model_arrays(problem()[2])[0], 4, 20.0, evaluate_fn=lambda t, arrays: models.append(load(arrays)))
    assert [row["active"] for row in strategy.rows] == [5, 0, 0]
    assert all(row["failed"].keys() == set(row["sent"]) for row in strategy.rows[1:])  # every client has a reason
    assert not torch.equal(models[0], models[1])
    assert torch.equal(models[1], models[2])
    assert torch.equal(models[2], models[3])


def load(arrays):
    return torch.cat([torch.from_numpy(array.numpy().copy()).flatten() for array in arrays.values()])


def in_flowers_loop(strategy, toy, rounds):
    with mff.Federation(toy, 3).running() as grid:
        return Strategy.start(strategy, grid, toy.initial(), rounds, 10.0)


def test_flowers_own_loop_fails_too():
    with pytest.raises(NothingLearned, match=r"out of memory|no valid reply"):
        in_flowers_loop(mff.MimiC(**OPTIONS), failing(range(9)), 5)


def test_patience_bounds_the_wait_in_flowers_own_loop():
    with pytest.raises(UsageError, match="waited 7 s for 9"):
        in_flowers_loop(mff.MimiC(**(OPTIONS | {"wait_for": 9, "patience": 7.0})), Toy(), 1)


@pytest.mark.parametrize("kind", ["no metrics", "loss is a list", "samples are a list", "unknown type", "other metrics", "empty reply"])
def test_a_run_with_hostile_replies_can_be_resumed(tmp_path, kind):
    """Rows and checkpoints hold nothing that a restart cannot read; evaluation is spoiled, too."""

    def spoil(number, reply, message):
        if number == 1:
            try:
                ATTACKS[kind](reply.content)
            except (IndexError, StopIteration):  # an evaluation has no arrays
                reply.content.clear()
        return reply

    for rounds in (2, 4):
        strategy = mff.MimiC(folder=tmp_path, lr=0.3, wait_for=3)
        run(strategy, Toy(spoil=spoil), rounds=rounds)
    assert len(strategy.rows) == 4
    assert all({"0", "2"} <= set(row["answered"]) for row in strategy.rows)


@pytest.mark.parametrize("name", ["FedAvg", "MimiC"])
def test_updates_are_written_once_and_aggregated_where_they_lie(monkeypatch, name):
    """The cost of a round: one matrix for the updates of all rounds, which the algorithm gets without a copy."""
    kind, seen = getattr(algorithms, name), []
    original = kind.aggregate

    def aggregate(self, state, active, g, step):
        seen.append((g.data_ptr(), strategy._matrix.data_ptr()))
        return original(self, state, active, g, step)

    monkeypatch.setattr(kind, "aggregate", aggregate)
    strategy = getattr(mff, name)(**OPTIONS)
    run(strategy, Toy(), rounds=3)
    assert len(seen) == 3
    assert len({address for pair in seen for address in pair}) == 1
