"""Replies that arrive after their round has closed, while clients evaluate: they belong to the next round."""

import pytest
import torch

import mimicfl.flower as mff
from mimicfl.flower.in_process import Delayed
from tests.flower.problems import LOCAL, N, app, federate, participation, simulated

BASE = {"fraction_evaluate": 1.0, "lr": LOCAL.lr, "wait_for": N}


class Straggler:
    """Client 4 replies to round 0 after its deadline, while the others evaluate the new model."""

    def __init__(self):
        self.app = app()

    def __call__(self, node, message, context):
        client, reply = int(context.node_config["partition-id"]), self.app(message, context)
        kind = message.metadata.message_type
        t = int(message.content["config"]["server-round"]) - 1 if kind != "query" else -1
        late = {("train", 4): 2.0, ("evaluate", 0): 1.0}.get((kind, client)) if t == 0 else None
        return reply if late is None else Delayed(reply, late)


@pytest.mark.parametrize("policy", ["refuse", "count"])
def test_a_reply_during_evaluation_is_not_counted_in_the_closed_round(policy):
    strategy = mff.MimiC(late=policy, **BASE)
    federate(strategy, 3, Straggler(), timeout=1.5)
    first, second, _ = strategy.rows
    assert first["answered"] == ["0", "1", "2", "3"]
    assert first["active"] == 4
    assert "deadline" in first["failed"]["4"]
    assert not first["late"]
    assert first["bytes_up"] == 4 * 4 * strategy.form.layout.size
    if policy == "refuse":
        assert second["refused_late"] == {"4": 0}
        assert torch.equal(strategy.form.w, simulated("mimic", participation(strategy.rows)).params)
    else:
        assert second["late"] == {"4": 0}
        assert second["answered"] == ["0", "1", "2", "3", "4"]
