"""The methods of Flower's strategies, which Flower's own loop, wrappers such as differential privacy, and mimicfl's round loop call."""

import logging
from collections.abc import Iterable
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from ..algorithms.base import pack
from ..errors import UsageError
from .failed_rounds import FailedRounds
from .interface import Strategy
from .loop import Loop
from .messages import Recent, SentMessage
from .names import natural_key
from .replies import Update, printable, same_metrics
from .rounds import RoundSteps
from .selection import sample, select_clients
from .wire import Refused, records_of

log = logging.getLogger("flwr")


class StrategyMethods(RoundSteps):
    """`configure_train`, `aggregate_train`, `configure_evaluate` and `aggregate_evaluate`."""

    failures: FailedRounds
    _loop: Loop | None
    _outgoing: list[tuple[Message, SentMessage]]  # the messages of this round
    _released: Recent
    _arrived: dict[str, tuple[SentMessage, Update | None]]  # id of the message -> its checked reply

    @property
    def keeps_replies(self) -> bool:
        """Whether `aggregate_train` is overridden and must get the clients' arrays, which are otherwise released once they are read."""
        return bool(overridden(self, "aggregate_train"))

    def arrived(self, sent: SentMessage, reply: Message, update: Update) -> None:
        """Keep a checked reply for `aggregate_train`, and release its arrays if nobody else needs them."""
        self._arrived[reply.metadata.reply_to_message_id] = (sent, None if self.keeps_replies else update)
        if not self.keeps_replies:
            for name, record in records_of(reply.content, ArrayRecord).items():
                del reply.content[name]
                self._released.add(record)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Select the clients of a round and create their messages."""
        loop = self._on(grid)
        if self.form.own_exchange:
            raise UsageError("secure rounds have messages of their own: call the strategy's own start(), without a wrapper")
        if self.average and not loop.running:
            raise UsageError("averaged models need the strategy's own start(), without a wrapper, which would send the mean to clients")
        if not loop.running:  # Flower's loop, or a wrapper's
            if self._model is None:
                self.begin(arrays)
            loop.open_round(server_round - 1)
        self._adopt(arrays, loop)
        clients = {c: node for c, node in select_clients(loop, server_round - 1).items() if loop.admit(c)}
        config["server-round"] = server_round
        # Wrappers compare the clients' arrays with the model, so that clients must return weights; `client_app` does so if asked.
        plain = {} if loop.running else {"reply": "weights"}
        request, contents = self.request(server_round - 1, list(clients), arrays, dict(config) | plain)
        self._request, self._outgoing, loop.round.eta_L = request, [], request.eta_L
        for client, content in contents.items():
            message = Message(content, clients[client], MessageType.TRAIN, ttl=loop.ttl, group_id=str(server_round))
            self._outgoing.append((message, SentMessage(clients[client], client, "train", request.t, request)))
        return [message for message, _ in self._outgoing]

    def _on(self, grid: Grid) -> Loop:
        """The loop on this grid; a new one for Flower's loop."""
        if self._loop is None or self._loop.grid is not grid:
            self._loop = Loop(cast(Strategy, self), grid)
        return self._loop

    def _adopt(self, arrays: ArrayRecord, loop: Loop) -> None:
        """Continue from the model that a subclass or a wrapper has made of ours."""
        if arrays is self._model:
            return
        self._check_unchanged(arrays)
        self.form.adopt(arrays)
        memories = [name for name in pack(self.form.server.state) if name != "state.w"]
        if not loop.running and memories and self._model is not None and loop.round.t == 1:
            log.warning(
                "the model was changed between rounds, as by a wrapper for differential privacy: training continues from it. Privacy "
                "accounting assumes plain averages; it does not cover the memory of %s",
                type(self.algorithm).__name__,
            )
        self._model = arrays

    def sent_with(self, message: Message) -> SentMessage:
        """What is known about a message of `configure_train`, also if a subclass created it."""
        known = next((sent for mine, sent in self._outgoing if mine is message), None)
        if known is None:
            assert self._loop is not None
            node = message.metadata.dst_node_id
            client = self._loop.roster.client_of.get(node, f"node-{node}")
            request = getattr(self, "_request", None) or self.request(self._loop.round.t, [], self._loop.arrays, {})[0]
            known = SentMessage(node, client, "train", request.t, request)
            self._outgoing.append((message, known))
        return known

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies of a round; returns the new model and the clients' metrics, or None where nothing is aggregated."""
        assert self._loop is not None, "configure_train is called first"
        loop, current, eta_L = self._loop, self._loop.round, 1.0
        sent_by_id = {message.metadata.message_id: sent for message, sent in self._outgoing}
        updates: dict[str, Update] = {}
        contents: dict[str, RecordDict] = {}
        errors: list[Message] = []
        for reply in replies:
            key = reply.metadata.reply_to_message_id
            sent, update = self._arrived.pop(key, (sent_by_id.get(key), None))
            if sent is None or reply.has_error():
                errors += [reply] if reply.has_error() else []
                continue
            try:
                sent = sent if loop.running else loop.identified(sent, reply)
                updates[sent.client] = update or self.read(sent, reply)
                contents[sent.client] = reply.content
            except Refused as why:
                self._refuse(sent.client, str(why))
        self._arrived.clear()
        self._log_replies("aggregate_train", len(updates), errors)
        eta_L = current.eta_L if current.eta_L is not None else 1.0
        for client, excess in self.bound.refuse(updates, self.form.w, self.form.buffers, eta_L, self.form.weighting == "samples").items():
            self._refuse(client, excess)
            del updates[client], contents[client]
        if 0 < len(updates) < self.failures.min_counted:
            for client in updates:
                self._refuse(client, f"the round has only {len(updates)} valid update(s), min_counted is {self.failures.min_counted}")
            updates, contents = {}, {}
        current.updates, current.eta = updates, self.apply(server_round - 1, eta_L, updates)
        if not loop.running:
            failed = {sent.client: "no valid reply" for _, sent in self._outgoing if sent.client not in updates} | current.failed
            self.failures.note({"active": len(updates), "sent": list(failed), "failed": failed})
        if not updates:
            return None, None
        return self.hand_out(), self.metrics(list(contents.values()))

    def _log_replies(self, step: str, results: int, errors: list[Message]) -> None:
        """Log what was received, as Flower does."""
        if results or errors:
            log.info("%s: Received %s results and %s failures", step, results, len(errors))
        for reply in errors:
            log.info("\t> Received error in reply from node %d: %s", reply.metadata.src_node_id, printable(reply.error.reason or ""))

    def _refuse(self, client: str, why: str) -> None:
        assert self._loop is not None
        self._loop.round.failed[client] = why
        log.warning("round %s: reply of client %s refused: %s", self._loop.round.t + 1, client, why)

    def metrics(self, contents: list[RecordDict]) -> MetricRecord | None:
        """The clients' metrics, averaged as in Flower, over the clients that report the same metrics as most."""
        alike = same_metrics(contents, self.weighted_by_key)
        return self.train_metrics_aggr_fn(alike, self.weighted_by_key) if alike else None

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Sample idle clients for federated evaluation and create their messages."""
        if self.fraction_evaluate == 0:
            return []
        loop = self._on(grid)
        loop.roster.refresh()
        idle = loop.roster.idle()
        names = sorted(idle, key=natural_key)
        chosen = sample(len(names), self.fraction_evaluate, self.min_evaluate_nodes, (self.seed, "evaluate", server_round - 1))
        log.info("configure_evaluate: Sampled %s nodes (out of %s)", len(chosen), len(loop.roster.online))
        config["server-round"] = server_round
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        kind, group = MessageType.EVALUATE, str(server_round)
        return [Message(content, idle[names[k]], kind, ttl=loop.ttl, group_id=group) for k in chosen]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics, over the clients that report the same metrics as most; the others are left out."""
        received = list(replies)
        if not received:
            return None
        contents = [reply.content for reply in received if not reply.has_error()]
        self._log_replies("aggregate_evaluate", len(contents), [reply for reply in received if reply.has_error()])
        alike = same_metrics(contents, self.weighted_by_key)
        if len(alike) < len(contents):
            log.warning("round %s: %s evaluation result(s) left out: other metrics, or no weight", server_round, len(contents) - len(alike))
        return self.evaluate_metrics_aggr_fn(alike, self.weighted_by_key) if alike else None


def overridden(strategy: StrategyMethods, *methods: str) -> str:
    """The first of these methods that a subclass overrides, or an empty text."""
    return next((name for name in methods if getattr(type(strategy), name) is not getattr(StrategyMethods, name)), "")
