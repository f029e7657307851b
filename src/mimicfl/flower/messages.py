"""Requests to clients and their replies: sends messages, collects the replies, and tracks which messages are in flight.

A reply is matched by the id of the message it answers, not by its sender: the SuperLink sends error replies on behalf of a dead
node under its own id. A node with a message in flight is busy and gets no second one, so clients never work on outdated rounds.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from .clock import clock_of
from .pull import UNREADABLE, Inbox
from .replies import printable
from .wire import size

# Flower's error codes, in words.
REASONS = {
    1: "its app could not be loaded",
    2: "its app raised an error",
    3: "the message expired before the client replied",
    4: "its reply expired",
    5: "its node is offline",
    6: "a mod of its app refused the message",
    7: "its app bundle is invalid",
    8: "its app crashed",
    UNREADABLE: "its reply cannot be read",
}
KEPT = 1 << 26  # bytes
RESTARTED = "it restarted during the round"


@dataclass(frozen=True)
class SentMessage:
    """A message in flight: its destination, and what is needed to interpret the reply."""

    node: int
    client: str
    kind: str  # train, hello, evaluate, secure
    t: int = 0
    details: Any = None  # kind "train": the `RoundRequest`; kind "secure": the stage of the protocol


@dataclass(frozen=True)
class RoundRequest:
    """The model and rate that a round sent out. A late reply is compared with these, not with the current model."""

    t: int
    w: Tensor  # [d] the global model as it was sent
    eta_L: float
    starts: dict[str, Tensor] = field(default_factory=dict)  # [d] per client that was sent another model to start from
    places: dict[str, Tensor] = field(default_factory=dict)  # [d] per client, where to write its update
    ticket: str = ""  # identifies the request where clients keep a residual
    per_client: bool = False  # whether the requests hold state of single clients, such as SCAFFOLD's shift


class Messages:
    """Sends messages through a grid and collects the replies."""

    def __init__(self, grid: Grid, poll: float | None = None) -> None:
        self.grid, self.clock, self.inbox = grid, clock_of(grid, poll), Inbox(grid)
        self.in_flight: dict[str, SentMessage] = {}  # message id -> message
        self.doubted: dict[str, SentMessage] = {}  # to nodes that are believed to be dead, since another one has their client's id
        self.alive: list[SentMessage] = []  # doubted messages that were answered after all

    def send(self, requests: list[tuple[Message, SentMessage]]) -> list[SentMessage]:
        """Push messages to the SuperLink; returns those that it did not accept."""
        messages = [message for message, _ in requests]
        accepted = {str(m) for m in self.grid.push_messages(messages)} if messages else set()
        if messages and not accepted:  # together they may exceed the size limit: push them one by one
            accepted = {str(m) for message in messages for m in self.grid.push_messages([message])}
        rejected = []
        for message, (_, sent) in zip(messages, requests, strict=True):
            if message.metadata.message_id in accepted:
                self.in_flight[message.metadata.message_id] = sent
            else:
                rejected.append(sent)
        return rejected

    def collect(self) -> Iterator[tuple[SentMessage, Message]]:
        """All replies since the last call, error replies included, each with the message it answers.

        One after the other, so that a reply can be released before the next one is received.
        """
        if not self.in_flight and not self.doubted:
            return
        for reply in self.inbox.pull([*self.in_flight, *self.doubted]):
            key = reply.metadata.reply_to_message_id
            if (sent := self.in_flight.pop(key, None)) is not None:
                yield sent, reply
            elif (sent := self.doubted.pop(key, None)) is not None and not reply.has_error():
                self.alive.append(sent)

    @property
    def busy(self) -> set[int]:
        """Nodes with a message in flight."""
        return {sent.node for sent in self.in_flight.values()}

    def drop(self, node: int) -> list[SentMessage]:
        """Stop waiting for a node that will not reply; returns its messages."""
        dropped = {message_id: sent for message_id, sent in self.in_flight.items() if sent.node == node}
        for message_id in dropped:
            self.doubted[message_id] = self.in_flight.pop(message_id)
        return list(dropped.values())


class Recent:
    """The arrays of the last replies, up to `KEPT` bytes.

    malloc returns memory to the system in heaps of 64 MiB once they are empty. If each reply were released at once, that would happen
    again and again, and the page faults would cost more CPU time than reading the replies.
    """

    def __init__(self) -> None:
        self.records: deque[tuple[int, ArrayRecord]] = deque()
        self.bytes = 0

    def add(self, record: ArrayRecord) -> None:
        self.records.append((size(record), record))
        self.bytes += self.records[-1][0]
        while self.bytes > KEPT:
            self.bytes -= self.records.popleft()[0]


def reason(reply: Message) -> str:
    """Describe the error of an error reply."""
    text = printable(reply.error.reason or "")
    description = REASONS.get(reply.error.code, f"error {reply.error.code}")
    return f"{description}: {text}" if text and reply.error.code in (0, 1, 2, 6, 8, UNREADABLE) else description
