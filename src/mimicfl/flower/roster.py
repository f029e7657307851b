"""The roster: which client runs on which node, and which clients are idle.

Flower assigns node ids, and a node that restarts may get a new one. Clients are therefore identified by their own id: each new
node gets one query (`hello`) and replies with `client-id` or `partition-id` of its node config. An app that does not reply to the query
is identified by what its training replies report, else by its node id, which survives restarts only if SuperNodes have keys.
"""

import itertools
import logging

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from .messages import Messages, SentMessage, reason
from .replies import reported_id
from .wire import MIMICFL

ALIVE = 20.0  # seconds in which a node must answer when another one reports the id of its client
PAUSE = 120.0  # seconds until a node that has answered is asked again, so that false reports cannot hold up a round for long
OFFLINE = 5  # the error code of a message to a node that is offline
UNAVAILABLE = (3, 4, OFFLINE)  # error codes without a reply from the node: the message or reply expired, or the node is offline
log = logging.getLogger("flwr")


def unnamed(client: str) -> bool:
    """Whether a client is known by its node id only."""
    return client.startswith("node-")


class Roster:
    """Maps clients to nodes and nodes to clients."""

    def __init__(self, grid: Grid, messages: Messages, query_ids: bool) -> None:
        self.grid, self.messages, self.query_ids = grid, messages, query_ids
        self.client_of: dict[int, str] = {}  # node -> client, for all nodes that were ever identified
        self.node_of: dict[str, int] = {}  # client -> the node that it last connected from
        self.online: set[int] = set()
        self.refreshed_at = float("-inf")
        self.claims: dict[int, str] = {}  # node -> the id that it reports, while another node that is online has that id
        self.probed: dict[int, float] = {}  # node -> until when it must answer, since another one reports the id of its client
        self.vouched: dict[int, float] = {}  # node -> when it last answered such a question
        self.dropped: list[SentMessage] = []  # to previous nodes of clients, until `take_dropped`
        self._events = itertools.count(1)
        self.joined: dict[str, int] = {}  # client -> number of the event of its registration
        self.heard: dict[str, int] = {}  # client -> number of the event of its last reply

    def refresh(self) -> None:
        """List the nodes that are online and query the ids of new ones; pass their replies to `handle_hello`."""
        clock = self.messages.clock
        if clock.now() - self.refreshed_at < 5 * clock.poll:
            return  # listing nodes costs a request: do it less often than polling for replies
        self.refreshed_at = clock.now()
        self.online = set(self.grid.get_node_ids())
        for sent in self.messages.alive:
            self._reinstate(sent)
        self.messages.alive.clear()
        for node, client in list(self.claims.items()):
            if (current := self.node_of.get(client)) not in self.online or self._silent(current):
                del self.claims[node]
                self.register(node, client)
        queried = {sent.node for sent in self.messages.in_flight.values() if sent.kind == "hello"}
        new = sorted(self.online - self.client_of.keys() - queried)
        if self.query_ids:
            self._query(dict.fromkeys(new, ""))
        else:
            for node in new:
                self.register(node, f"node-{node}")

    def _query(self, nodes: dict[int, str]) -> None:
        """Ask nodes for their ids; if a node's client is known, ask whether it still runs there."""
        queries = []
        for node, client in nodes.items():
            content = RecordDict({MIMICFL: ConfigRecord({"hello": 1})})
            queries.append((Message(content, node, MessageType.QUERY, group_id="0"), SentMessage(node, client, "hello")))
        self.messages.send(queries)

    def _claim(self, node: int, client: str, current: int) -> None:
        """Note that a node reports the id of a client that runs on another one, and ask that one whether it is alive."""
        log.warning(
            "node %s reports the id of client %s, which is connected as node %s: ignored while that is online", node, client, current
        )
        self.claims[node] = client
        now = self.messages.clock.now()
        if current not in self.probed and now >= self.vouched.get(current, float("-inf")) + PAUSE:
            self._query({current: client})
            self.probed |= {current: now + ALIVE} if current in self.messages.busy else {}

    def _silent(self, node: int | None) -> bool:
        """Whether a node was asked if it is alive and has not answered in time."""
        return self.messages.clock.now() >= self.probed.get(node or 0, float("inf"))

    def handle_hello(self, sent: SentMessage, reply: Message) -> None:
        """Register the client that replied."""
        self.probed.pop(sent.node, None)
        if reply.has_error() and reply.error.code in UNAVAILABLE:
            return  # the node went offline; if it is back online, `refresh` queries it again
        if sent.client:  # it is alive
            self.vouched[sent.node] = self.messages.clock.now()
            return
        client = None if reply.has_error() else reported_id(reply.content)
        if client is None:
            why = reason(reply) if reply.has_error() else "its reply has no usable client-id"
            log.info("node %s does not report a client id (%s): using its node id", sent.node, why[:120])
            client = f"node-{sent.node}"
        self.register(sent.node, client)

    def register(self, node: int, client: str) -> None:
        """Record that this client runs on this node. Messages to its previous node will never be answered: they are `dropped`."""
        self.client_of[node] = client
        previous = self.node_of.get(client)
        # A node that died while it trained is busy. An idle one may be alive, and the other one a stranger or a mistake.
        dead = previous in self.messages.busy and (previous not in self.probed or self._silent(previous))
        if previous is not None and previous != node and previous in self.online and not dead:
            self._claim(node, client, previous)
            return
        self.joined.setdefault(client, next(self._events))
        self.node_of[client] = node
        if previous is not None and previous != node:
            log.info("client %s reconnected as node %s (previously node %s)", client, node, previous)
            self.probed.pop(previous, None)
            self.dropped += self.messages.drop(previous)

    def take_dropped(self) -> list[SentMessage]:
        """The messages that nobody answers any more, once."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def _reinstate(self, sent: SentMessage) -> None:
        """Give a client back to the node that answered although another one had reported its id."""
        claimant = self.node_of.get(sent.client)
        if claimant is not None and claimant != sent.node and sent.node in self.online:
            log.warning("client %s still runs on node %s: node %s reported its id and is ignored", sent.client, sent.node, claimant)
            self.node_of[sent.client] = sent.node
            self.claims[claimant] = sent.client

    def rename(self, node: int, client: str) -> None:
        """Give a node that was known by its id only the client id that it reports."""
        self.node_of.pop(f"node-{node}", None)
        self.register(node, client)

    def note_reply(self, sent: SentMessage, reply: Message) -> None:
        """Remember who was heard from last, and whose node is offline: the list of nodes may be a second old."""
        if not reply.has_error():
            self.heard[sent.client] = next(self._events)
        elif reply.error.code == OFFLINE:
            self.online.discard(sent.node)
            self.refreshed_at = float("-inf")

    def gone(self, client: str) -> bool:
        """Whether a client is known by its node id only and that node is no longer online."""
        return unnamed(client) and self.node_of.get(client) not in self.online

    def may_be(self, departed: str, client: str) -> bool:
        """Whether a client known by its node id only may be a departed one: it joined after that one was last heard from."""
        return unnamed(client) and client != departed and self.joined.get(client, 0) > self.heard.get(departed, 0)

    def idle(self) -> dict[str, int]:
        """Clients that are online and have no message in flight: client -> node."""
        busy = self.messages.busy
        return {client: node for client, node in self.node_of.items() if node in self.online and node not in busy}
