"""Flower's in-memory SuperLink with its clients in this process: the real grid and messages, no Ray, no network.

For tests, for trying an app, and for availability studies at small scale. It speaks to Flower's simulation internals, which
the version bound of the `flower` extra keeps in place.
"""

import contextlib
import copy
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.common.constant import HEARTBEAT_INTERVAL_INF, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
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

from ..errors import whole
from .client import hello
from .wire import OURS, words

PULL = 0.005
log = logging.getLogger("flwr")
Handler = Callable[[int, Message, Context], Message | None]


class Federation:
    """A SuperLink in memory, and a client for each of `num_clients` nodes."""

    def __init__(self, client_app: ClientApp | Handler, num_clients: int, node_config: Mapping[str, Any] | None = None) -> None:
        os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
        factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
        self.state = factory.state()
        run = Run.create_empty(run_id=secrets.randbits(62))
        run.primary_task_id, run.federation_id = secrets.randbits(62), NOOP_FEDERATION_ID
        self.run_id = run.run_id
        self.state.run_ids[run.run_id] = RunRecord(run=run)  # type: ignore[attr-defined]
        self.state.task_store[run.primary_task_id] = Task(task_id=run.primary_task_id, run_id=run.run_id)  # type: ignore[attr-defined]
        # Messages are stamped with the process's task: there is one federation at a time in a process.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run.run_id, SUPERLINK_NODE_ID
        self.grid: Grid = InMemoryGrid(factory, pull_interval=PULL)
        self.grid.set_run(run)
        self.app = client_app
        self.node_config = dict(node_config or {})
        self.contexts: dict[int, Context] = {}
        self.stop = threading.Event()
        for number in range(whole("num_clients", num_clients)):
            self.join({"partition-id": number, "num-partitions": num_clients})

    def join(self, config: dict[str, Any]) -> int:
        """One more node, with this node config; returns its id."""
        never = HEARTBEAT_INTERVAL_INF
        node = self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, secrets.token_bytes(32), heartbeat_interval=never)
        self.state.acknowledge_node_heartbeat(node_id=node, heartbeat_interval=never)
        settings = self.node_config | config
        self.contexts[node] = Context(run_id=self.run_id, node_id=node, node_config=settings, state=RecordDict(), run_config={})
        return int(node)

    @contextlib.contextmanager
    def running(self, workers: int = 1) -> Iterator[Grid]:
        """Clients answer while the block runs."""
        with ThreadPoolExecutor(workers + 1) as pool:
            watching = pool.submit(self._serve, pool)
            try:
                yield self.grid
            finally:
                self.stop.set()
                watching.result()

    def _serve(self, pool: ThreadPoolExecutor) -> None:
        while not self.stop.is_set():
            for node in list(self.contexts):
                for message in self.state.get_message_ins(node_id=node, limit=1):
                    pool.submit(self._answer, node, message)
            self.stop.wait(PULL)

    def _answer(self, node: int, message: Message) -> None:
        context = self.contexts[node]
        message = copy.deepcopy(message)  # as after a network: what a client does to its letter is its own affair
        try:
            reply = self.app(message, context) if isinstance(self.app, ClientApp) else self.app(node, message, context)
        except Exception as error:
            log.debug("client at node %s", node, exc_info=True)
            reply = Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)
        greeted = isinstance(self.app, ClientApp) and "hello" in words(message.content, OURS)
        if greeted and reply is not None and (reply.has_error() or "client-id" not in words(reply.content, OURS)):
            reply = hello(message, context)  # an app that does not say who it is: its place here is known
        if reply is not None:  # None: the client has gone without a word
            reply.metadata.__dict__["_message_id"] = secrets.token_hex(16)
            self.state.store_message_res(reply)


def simulate(
    server_app: ServerApp, client_app: ClientApp, num_clients: int, run_config: Mapping[str, Any] | None = None, workers: int = 1
) -> None:
    """Run a ServerApp with `num_clients` virtual clients in this process, until its main function returns."""
    federation = Federation(client_app, num_clients)
    context = Context(run_id=federation.run_id, node_id=0, node_config={}, state=RecordDict(), run_config=dict(run_config or {}))
    with federation.running(workers) as grid:
        server_app(grid, context)
