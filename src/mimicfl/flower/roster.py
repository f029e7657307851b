"""Who is there: nodes come and go under ids of Flower's making, clients are known by an id of their own.

A new node is asked once who it is (`hello`); it answers with `client-id` or `partition-id` of its node config. An app that does
not answer is known by its node id, which stays the same across restarts only where SuperNodes have authentication keys.
"""

import logging

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from .post import Post, Sent, reason
from .wire import OURS, words

GONE = (3, 4, 5)  # error codes of an answer that never came: expired, or the node is gone
log = logging.getLogger("flwr")


class Roster:
    """Which client is at which node now."""

    def __init__(self, grid: Grid, post: Post, ask: bool) -> None:
        self.grid, self.post, self.ask = grid, post, ask
        self.names: dict[int, str] = {}  # every node that has told its name
        self.at: dict[str, int] = {}  # client -> the node it was last heard from
        self.online: set[int] = set()
        self.looked = float("-inf")

    def refresh(self) -> None:
        """Look who is online and greet the new ones; answers to the greeting come through `hear`."""
        clock = self.post.clock
        if clock.now() - self.looked < 5 * clock.poll:
            return  # answers are looked for more often than newcomers
        self.looked = clock.now()
        self.online = set(self.grid.get_node_ids())
        greeted = {sent.node for sent in self.post.under_way.values() if sent.kind == "hello"}
        new = sorted(self.online - self.names.keys() - greeted)
        if self.ask:
            self.post.send([(RecordDict({OURS: ConfigRecord({"hello": 1})}), Sent(n, "", "hello")) for n in new], MessageType.QUERY)
        else:
            for node in new:
                self.name(node, f"node-{node}")

    def hear(self, sent: Sent, reply: Message) -> list[Sent]:
        """An answer to a greeting; returns letters that will never be answered, since their client has come back elsewhere."""
        told = None if reply.has_error() else words(reply.content, OURS).get("client-id")
        if reply.has_error() and reply.error.code in GONE:
            return []  # it went away before it answered; if it is still there, it is asked again
        if not isinstance(told, str) or not told:
            why = reason(reply) if reply.has_error() else "no client-id in its answer"
            log.info("node %s does not say who it is (%s): it is known by its node id", sent.node, why[:120])
            told = f"node-{sent.node}"
        return self.name(sent.node, told)

    def name(self, node: int, client: str) -> list[Sent]:
        """The client at this node; returns letters to where it was before."""
        self.names[node] = client
        before, self.at[client] = self.at.get(client), node
        if before is None or before == node:
            return []
        log.info("client %s is back, as node %s (before: %s)", client, node, before)
        return self.post.forget(before)

    def idle(self) -> dict[str, int]:
        """Clients that are online and have nothing to do, with their nodes."""
        busy = self.post.busy
        return {client: node for client, node in self.at.items() if node in self.online and node not in busy}
