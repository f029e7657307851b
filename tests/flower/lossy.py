"""A client app that loses replies, and runs of MimiC's client-side forms with it."""

import mimicfl.flower as mff
from tests.flower.problems import LOCAL, N, app, federate

BASE = {"fraction_evaluate": 0.0, "lr": LOCAL.lr, "num_clients": N, "wait_for": N}


class Lossy:
    """A client app that loses replies: `failure(client, t, stage)` returns "before" (training), "after" (it) or "" (no loss)."""

    def __init__(self, folder, failure):
        self.app, self.failure = app(state=folder), failure

    def __call__(self, node, message, context):
        if message.metadata.message_type != "train":
            return self.app(message, context)
        client = int(context.node_config["partition-id"])
        stage = dict(message.content.config_records.get("secaggplus_configs", {})).get("stage", "train")
        t = int(message.metadata.group_id) - 1
        failure = self.failure(client, t, stage)
        if failure == "before":
            raise RuntimeError("dropped out before training")
        reply = self.app(message, context)
        if failure == "after":
            raise RuntimeError("trained and wrote its pending update, but the reply was lost")
        return reply


def start(form, rounds, client, **options):
    strategy = mff.MimiC(form=form, **(BASE | options))
    result, _ = federate(strategy, rounds, client, timeout=10.0)
    return strategy, result
