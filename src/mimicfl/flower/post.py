"""Letters out, answers in: which messages are under way, to whom, and what became of them.

An answer is known by the message it replies to, never by who seems to have sent it: the SuperLink answers for a dead node under
its own id. A node with a letter under way is busy and gets no second one, so nobody works through rounds long gone.
"""

from dataclasses import dataclass
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from .clock import clock_of

REASONS = {
    1: "its app could not be loaded",
    2: "its app raised an error",
    3: "the message expired before it was answered",
    4: "its answer expired",
    5: "its node is gone",
    6: "a mod of its app refused",
    7: "its app bundle is invalid",
    8: "its app crashed",
}


@dataclass(frozen=True)
class Sent:
    node: int
    client: str
    kind: str  # train, hello, evaluate, ...
    t: int = 0
    about: Any = None  # what the sender wants to remember of it


class Post:
    """The push and pull side of a grid."""

    def __init__(self, grid: Grid, poll: float | None = None) -> None:
        self.grid, self.clock = grid, clock_of(grid, poll)
        self.under_way: dict[str, Sent] = {}

    def send(self, letters: list[tuple[RecordDict, Sent]], message_type: str, ttl: float | None = None) -> list[Sent]:
        """Push them; returns those that the SuperLink would not take."""
        messages = [Message(content, s.node, message_type, ttl=ttl, group_id=str(s.t + 1)) for content, s in letters]
        taken = {str(m) for m in self.grid.push_messages(messages)} if messages else set()
        if messages and not taken:  # too large together: one by one
            taken = {str(m) for message in messages for m in self.grid.push_messages([message])}
        lost = []
        for message, (_, sent) in zip(messages, letters, strict=True):
            if message.metadata.message_id in taken:
                self.under_way[message.metadata.message_id] = sent
            else:
                lost.append(sent)
        return lost

    def collect(self) -> list[tuple[Sent, Message]]:
        """All answers that have come in since, errors included."""
        if not self.under_way:
            return []
        answers = []
        for reply in self.grid.pull_messages(list(self.under_way)):
            sent = self.under_way.pop(reply.metadata.reply_to_message_id, None)
            if sent is not None:
                answers.append((sent, reply))
        return answers

    @property
    def busy(self) -> set[int]:
        return {sent.node for sent in self.under_way.values()}

    def forget(self, node: int) -> list[Sent]:
        """A node that will not answer any more."""
        gone = {message: sent for message, sent in self.under_way.items() if sent.node == node}
        for message in gone:
            del self.under_way[message]
        return list(gone.values())


def reason(reply: Message) -> str:
    """Why an error reply is one, in words."""
    text = " ".join((reply.error.reason or "").split())
    words = REASONS.get(reply.error.code, f"error {reply.error.code}")
    return f"{words}: {text[:200]}" if text and reply.error.code in (0, 1, 2, 6, 8) else words
