"""A federation of quadratics: client i pulls every coordinate towards its target. No model, no data, any app."""

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

import mimicfl.flower as mff


class Toy:
    """Clients with targets 0, 1, 2, ...: each returns w - lr (w - target). Without ids, unless `hello`."""

    def __init__(self, lr=0.3, hello=True, dim=3, spoil=None, metrics=None, offset=0.0):
        self.lr, self.hello, self.dim, self.spoil, self.metrics, self.offset = lr, hello, dim, spoil, metrics, offset
        self.target_of = {}  # node -> target, for nodes that joined later

    def initial(self):
        return ArrayRecord({"w": Array(np.zeros(self.dim, dtype=np.float32))})

    def __call__(self, node, message, context):
        kind = message.metadata.message_type
        if kind == "query":
            if not self.hello:
                raise ValueError("no query function")
            return mff.hello(message, context)
        number = context.node_config["partition-id"]
        target = self.target_of.get(node, number + self.offset)
        w = message.content["arrays"]["w"].numpy()
        if kind == "evaluate":
            values = {"num-examples": 1 + number, "weight": 2.0 + number, "loss": float(np.mean((w - target) ** 2))}
            reply = Message(RecordDict({"metrics": MetricRecord(values)}), reply_to=message)
        else:
            lr = message.content["config"].get("lr", self.lr)
            values = {"num-examples": 1, "train-loss": float(np.mean((w - target) ** 2))} if self.metrics is None else self.metrics(number)
            new = (w - lr * (w - target)).astype(np.float32)
            reply = Message(RecordDict({"arrays": ArrayRecord({"w": Array(new)}), "metrics": MetricRecord(values)}), reply_to=message)
        return self.spoil(number, reply, message) if self.spoil else reply


def run(strategy, toy, clients=3, rounds=5, timeout=10.0, events=None, **options):
    """Start the strategy; `events` maps the number of a round to a function of the federation that runs before its first message."""
    events = dict(events or {})

    def client(node, message, context):
        if message.metadata.message_type == "train":
            t = int(message.content["config"]["server-round"]) - 1
            if t in events:
                events.pop(t)(federation)
        return toy(node, message, context)

    federation = mff.Federation(client, clients)
    with federation.running() as grid:
        return strategy.start(grid, toy.initial(), rounds, timeout, **options)
