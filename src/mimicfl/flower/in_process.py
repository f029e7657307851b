"""Flower's in-memory SuperLink with its clients in this process: the real grid and messages, no Ray, no network.

For tests, for trying an app, and for small availability studies. Deadlines are in virtual time, see `clock.py`. This module
uses internals of Flower's simulation, so the `flower` extra bounds the version of flwr.
"""

import contextlib
import copy
import logging
import math
import os
import secrets
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import DEFAULT_TTL, Context, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.common.constant import HEARTBEAT_INTERVAL_INF, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid

from ..errors import UsageError, integer
from .client import hello
from .clock import VirtualClock
from .wire import MIMICFL, read_config

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Delayed:
    """A reply that arrives after a number of virtual seconds."""

    reply: Message
    seconds: float


Handler = Callable[[int, Message, Context], Message | Delayed | None]


class InProcessGrid(InMemoryGrid):
    """Flower's in-memory grid in virtual time; clients start training when a message is pushed, and pulling waits for them."""

    def __init__(self, factory: LinkStateFactory, reply: Callable[[int, Message], Message | Delayed | None]) -> None:
        super().__init__(factory)
        self.clock, self.reply = VirtualClock(), reply
        self.pool: ThreadPoolExecutor | None = None
        self.workers = 1
        self.queue: deque[Message] = deque()  # messages whose clients have not started yet
        self.training: deque[tuple[str, Future[Message | Delayed | None]]] = deque()  # message -> its reply
        self.unanswered: dict[str, int] = {}  # message -> the event of its expiry

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        if self.pool is None:
            raise UsageError("the clients are not running; start the strategy inside `with federation.running() as grid`")
        lifetimes = []
        for message in (messages := list(messages)):
            lifetimes.append(message.metadata.ttl)
            message.metadata.ttl = DEFAULT_TTL  # the SuperLink measures real time and must not expire messages
        accepted = set(super().push_messages(messages))
        for message, seconds in zip(messages, lifetimes, strict=True):
            if message.metadata.message_id in accepted:
                self.queue.append(message)
                expired = Message(Error(code=ErrorCode.MESSAGE_UNAVAILABLE), reply_to=message)
                self.unanswered[message.metadata.message_id] = self.clock.after(seconds, partial(self._store, expired))
        self._start_clients()
        return accepted

    def _start_clients(self) -> None:
        """Let clients train, as many as there are workers: the replies of all of them might fill the memory."""
        while self.pool is not None and self.queue and len(self.training) < self.workers:
            message = self.queue.popleft()
            reply = self.pool.submit(self.reply, message.metadata.dst_node_id, message)
            self.training.append((message.metadata.message_id, reply))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return list(self.replies(message_ids))

    def replies(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """The replies, one after the other: waits for every client."""
        waiting = {message for message, _ in self.training} | {message.metadata.message_id for message in self.queue}
        asked = set(message_ids)
        yield from super().pull_messages(asked - waiting)
        while self.training:
            message_id, future = self.training.popleft()
            found = future.result()
            if isinstance(found, Delayed):
                self.clock.after(found.seconds, partial(self._store, found.reply))
            elif found is not None:  # None: the client dropped out without a reply
                self._store(found)
            del found, future  # the caller releases the reply
            yield from super().pull_messages(asked & {message_id})
            self._start_clients()

    def _store(self, reply: Message) -> None:
        """Store the first reply to a message; its expiry counts as a reply."""
        expiry = self.unanswered.pop(reply.metadata.reply_to_message_id, None)
        if expiry is not None:
            self.clock.cancel(expiry)
            reply.metadata.__dict__["_message_id"] = secrets.token_hex(16)
            self.state.store_message_res(reply)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """For Flower's own round loop; its timeout is in virtual time as well."""
        missing = set(self.push_messages(messages))
        deadline = self.clock.now() + (math.inf if timeout is None else timeout)
        replies: list[Message] = []
        while True:
            replies += self.pull_messages(missing)
            missing -= {reply.metadata.reply_to_message_id for reply in replies}
            if not missing or not self.clock.wait(deadline):
                return replies


class Federation:
    """A SuperLink in memory and `num_clients` nodes, each running `client_app`."""

    def __init__(
        self,
        client_app: ClientApp | Handler,
        num_clients: int,
        node_config: Mapping[str, Any] | None = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
        factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
        self.state = factory.state()
        run = Run.create_empty(run_id=secrets.randbits(62))
        run.primary_task_id, run.federation_id = secrets.randbits(62), NOOP_FEDERATION_ID
        self.run_id = run.run_id
        self.state.run_ids[run.run_id] = RunRecord(run=run)  # type: ignore[attr-defined]
        self.state.task_store[run.primary_task_id] = Task(task_id=run.primary_task_id, run_id=run.run_id)  # type: ignore[attr-defined]
        # Flower labels messages with the task of the process, so a process can hold one federation at a time.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run.run_id, SUPERLINK_NODE_ID
        self.grid = InProcessGrid(factory, self._reply)
        self.grid.set_run(run)
        self.app = client_app
        self.node_config, self.run_config = dict(node_config or {}), dict(run_config or {})
        self.contexts: dict[int, Context] = {}
        for number in range(integer("num_clients", num_clients)):
            self.join({"partition-id": number, "num-partitions": num_clients})

    def join(self, config: dict[str, Any]) -> int:
        """Add a node with this node config; returns its id."""
        never = HEARTBEAT_INTERVAL_INF
        node = self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, secrets.token_bytes(32), heartbeat_interval=never)
        self.state.acknowledge_node_heartbeat(node_id=node, heartbeat_interval=never)
        settings, run_config = self.node_config | config, dict(self.run_config)
        self.contexts[node] = Context(run_id=self.run_id, node_id=node, node_config=settings, state=RecordDict(), run_config=run_config)
        self.clock.after(0.0, lambda: None)  # an event, so that a waiting server lists the nodes again
        return int(node)

    def leave(self, node: int) -> None:
        """Take a node offline; it is not listed any more and its messages stay unanswered."""
        self.state.deactivate_node(node)

    @property
    def clock(self) -> VirtualClock:
        return self.grid.clock

    @contextlib.contextmanager
    def running(self, workers: int = 1) -> Iterator[Grid]:
        """Run the clients inside this block, `workers` at a time."""
        usual = torch.get_num_threads()  # a thread of the pool would else begin with the number that another client has just set
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(usual,)) as pool:
            self.grid.pool, self.grid.workers = pool, workers
            try:
                yield self.grid
            finally:
                self.grid.pool = None

    def _reply(self, node: int, message: Message) -> Message | Delayed | None:
        context = self.contexts[node]
        message = copy.deepcopy(message)  # as over a network: a client that modifies its message must not affect others
        try:
            reply = self.app(message, context) if isinstance(self.app, ClientApp) else self.app(node, message, context)
        except Exception as error:
            log.debug("client at node %s", node, exc_info=True)
            reply = Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=f"{type(error).__name__}: {error}"), reply_to=message)
        queried = isinstance(self.app, ClientApp) and "hello" in read_config(message.content, MIMICFL)
        if queried and isinstance(reply, Message) and (reply.has_error() or "client-id" not in read_config(reply.content, MIMICFL)):
            return hello(message, context)  # the app does not report an id: use its partition id
        return reply


def simulate(
    server_app: ServerApp, client_app: ClientApp, num_clients: int, run_config: Mapping[str, Any] | None = None, workers: int = 1
) -> None:
    """Run a ServerApp with `num_clients` virtual clients in this process, until its main function returns.

    Clients that store a correction do so in the run's folder, or in a temporary one.
    """
    folder = dict(run_config or {}).get("folder")
    with tempfile.TemporaryDirectory() as temporary:
        state = str(Path(str(folder)) / "clients") if folder else temporary
        _simulate(server_app, Federation(client_app, num_clients, {"state-dir": state}, run_config), workers)


def _simulate(server_app: ServerApp, federation: Federation, workers: int) -> None:
    context = Context(run_id=federation.run_id, node_id=0, node_config={}, state=RecordDict(), run_config=dict(federation.run_config))
    with federation.running(workers) as grid:
        server_app(grid, context)
