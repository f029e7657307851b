"""The messages of a round: requests to idle clients, their replies until the round closes, and what is refused."""

import dataclasses
import logging
import math
import time

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from .interface import Strategy
from .messages import RESTARTED, Messages, SentMessage, reason
from .replies import reported_id
from .roster import Roster, unnamed
from .round_record import Round
from .wire import Refused, records_of, size, vectors

log = logging.getLogger("flwr")


class Exchange:
    """Sends the requests of one round after the other, and collects the replies."""

    def __init__(self, strategy: Strategy, grid: Grid) -> None:
        self.strategy, self.grid = strategy, grid
        self.messages = Messages(grid, strategy.poll)
        self.clock = self.messages.clock  # for deadlines; a row's seconds are real time
        self.roster = Roster(grid, self.messages, strategy.query_ids)
        self.round = Round(0, time.monotonic())
        self.timeout, self.first = math.inf, 0
        self.train_config, self.arrays = ConfigRecord(), ArrayRecord()
        self.available: np.ndarray | None = None
        self._after_closing: list[tuple[SentMessage, Message]] = []  # training replies that arrived after their round had closed

    def open_round(self, t: int) -> None:
        """Begin a round; replies that arrived after the last one had closed are late replies of this one."""
        self.round = Round(t, time.monotonic())
        late, self._after_closing = self._after_closing, []
        for sent, reply in late:
            self._handle_train_reply(sent, reply)

    def exchange(self) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Send the round's requests, collect replies until the round closes, and aggregate them; returns the model and the metrics."""
        s, current = self.strategy, self.round
        messages = list(s.configure_train(current.t + 1, self.arrays, self.train_config, self.grid))
        deadline = self.clock.now() + self.timeout
        requests = [(message, s.sent_with(message)) for message in messages]
        rejected = self.messages.send(requests)
        current.sent |= {sent.client: sent for _, sent in requests}
        current.failed |= {sent.client: "the SuperLink did not accept the message" for sent in rejected}
        for message, _ in requests:
            self.count_download(message.content)
        quorum = self._quorum(len(current.sent))
        while current.waiting and current.on_time < quorum:
            self.collect()
            if not current.waiting or current.on_time >= quorum or not self.clock.wait(deadline):
                break
        closed = "the round closed after enough replies" if current.on_time >= quorum else "no reply before the deadline"
        current.failed |= dict.fromkeys(current.waiting, closed)
        current.closed = True
        return s.aggregate_train(current.t + 1, current.replies)

    @property
    def ttl(self) -> float | None:
        """Seconds until an unanswered message expires. If late replies are refused, the SuperLink may drop it after the deadline."""
        return self.timeout + 5 if self.strategy.late == "refuse" and math.isfinite(self.timeout) else None

    def admit(self, client: str) -> bool:
        """Assign the client a row of the algorithm's state; False if all rows are taken.

        A client that is known only by its node id may be one that was restarted: it takes over what is stored for a departed one. The
        sum of the corrections is then kept, also if it is another client.
        """
        form = self.strategy.form
        if self.strategy.query_ids and unnamed(client):
            for departed in [known for known in form.clients if known != client and self.roster.gone(known)]:
                if self.roster.may_be(departed, client):
                    form.take_over(departed, client)
                    log.info("node %s is offline: its correction passes to %s, presumably the same client", departed[5:], client)
                    break
        try:
            form.row(client)
        except Refused as why:
            self.round.failed[client] = str(why)
            return False
        return True

    def _quorum(self, sent: int) -> int:
        """The number of replies that close a round with `sent` requests."""
        e = self.strategy.enough
        return sent if e is None else e if isinstance(e, int) else max(1, math.ceil(e * sent - 1e-9))

    def collect(self, kind: str = "") -> list[tuple[SentMessage, Message]]:
        """Process all replies that have arrived; those of `kind` are returned to the caller instead."""
        self.roster.refresh()
        requested, hellos = [], []
        for sent, reply in self.messages.collect():
            self.roster.note_reply(sent, reply)
            if sent.kind == "hello":
                hellos.append((sent, reply))
            elif sent.kind == "train" and self.round.closed:
                self._after_closing.append((sent, reply))
            elif sent.kind == "train":
                self._handle_train_reply(sent, reply)
            elif sent.kind == kind:
                requested.append((sent, reply))
        for sent, reply in hellos:  # last: a new node may report the id of a client whose reply has just arrived
            self.roster.handle_hello(sent, reply)
        for dropped in self.roster.take_dropped():
            if (dropped.kind, dropped.t) == ("train", self.round.t) and dropped.client in self.round.waiting:
                self.round.failed[dropped.client] = RESTARTED
        return requested

    def _handle_train_reply(self, sent: SentMessage, reply: Message) -> None:
        """Check an update and add it to the current round, or record why it is refused."""
        current = self.round
        on_time = sent.t == current.t
        if reply.has_error():
            if on_time:
                current.failed[sent.client] = reason(reply)
                current.replies.append(reply)
            return
        try:
            sent = self.identified(sent, reply)
            if not on_time and (self.strategy.late == "refuse" or sent.client in current.updates):
                current.refused_late[sent.client] = sent.t
                return
            update = self.strategy.read(sent, reply)
        except Refused as why:
            if on_time:
                current.failed[sent.client] = str(why)
            return
        current.updates[sent.client] = update
        current.replies.append(reply)
        for name, record in records_of(reply.content, ArrayRecord).items():
            current.bytes_up += size(record)
            current.vectors_up += vectors(name, record)
        if not on_time:
            current.late[sent.client] = sent.t
        self.strategy.arrived(sent, reply, update)

    def identified(self, sent: SentMessage, reply: Message) -> SentMessage:
        """The message under the id that its reply reports, if the client was known only by its node id."""
        client = sent.client
        if not self.strategy.query_ids or client != f"node-{sent.node}" or (reported := reported_id(reply.content)) is None:
            return sent
        if reported in self.roster.node_of and self.roster.node_of[reported] in self.roster.online:
            raise Refused(f"it reports the id {reported}, but another node has that id")
        self.strategy.form.rename(client, reported)
        self.roster.rename(sent.node, reported)
        if sent.details.per_client:  # it was sent the state of another client
            raise Refused(f"it reports the id {reported} only now; it participates under that id from the next round")
        renamed = dataclasses.replace(sent, client=reported)
        if client in self.round.sent:
            self.round.sent = {(reported if c == client else c): (renamed if c == client else s) for c, s in self.round.sent.items()}
        self.admit(reported)
        return renamed

    def count_download(self, content: RecordDict) -> None:
        """Add a request's arrays to the round's traffic."""
        for record in records_of(content, ArrayRecord).values():
            self.round.bytes_down += size(record)
            self.round.vectors_down += 1
