"""The server form: the server holds all state, and clients are stateless.

It uses the same `Server` as the simulator and maps client ids to rows of its state.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from ..algorithms import declared, trait
from ..algorithms.base import Instructions, Step
from ..algorithms.client_memory import ClientMemory
from ..algorithms.server import Server
from ..algorithms.updates import ClientUpdates, Request
from ..errors import Diverged, UsageError
from .interface import RoundLoop
from .names import natural_key
from .replies import Update
from .robust import Robust
from .wire import Layout, Refused, config_record, vector


def constant(rate: float) -> Callable[[int, int], float]:
    return lambda t, active: rate


def stacked(vectors: list[Tensor]) -> Tensor:
    """Vectors [d] as rows [m, d]; without a copy if they lie in memory as the rows of one matrix."""
    base = vectors[0]._base
    if base is None or base.shape != (len(vectors), len(vectors[0])):
        return torch.stack(vectors)
    in_place = all(v._base is base and v.data_ptr() == row.data_ptr() for v, row in zip(vectors, base, strict=True))
    return base if in_place else torch.stack(vectors)


class ServerForm:
    """The server of one federation, and the mapping from clients to rows of its state."""

    name = "server"
    experiment = ""
    least_clients = 1  # that a round needs
    own_exchange = False  # whether a round has messages of its own
    robust: Robust | None = None

    def __init__(
        self,
        algorithm: Any,
        *,
        update: str = "sum",
        weighting: str = "uniform",
        num_clients: int | None = None,
        sizes: Mapping[str, float] | None = None,
    ) -> None:
        self.algorithm, self.update, self.weighting, self.num_clients, self.sizes = algorithm, update, weighting, num_clients, sizes
        label, needs_population = type(algorithm).__name__, declared(algorithm, "needs_population")
        if needs_population and num_clients is None:
            raise UsageError(f"{label} needs the number of clients; pass num_clients=N")
        if needs_population and weighting == "samples" and sizes is None:
            raise UsageError(f"{label} weights inactive clients too; pass sizes={{client: samples}} or weighting='uniform'")
        self.clients: list[str] = []  # row -> client, in order of first appearance; "" for a free row
        self._rows: dict[str, int] = {}  # client -> row
        self.acknowledged: dict[str, str] = {}  # client -> ticket of its last aggregated reply, if updates are compressed

    def begin(self, layout: Layout, arrays: ArrayRecord, **server: Any) -> None:
        """Initialise the state from the initial model; `server` holds options of `Server`."""
        self.layout = layout
        try:
            w, buffers = layout.read(arrays)
        except Refused as reason:
            raise UsageError(f"the initial arrays are invalid: {reason}") from None
        self.clients, self._rows, self.acknowledged = [], {}, {}
        share = torch.ones(self.num_clients or 1)  # reserves the rows; the weights are set per round
        unused = constant(1.0)  # the strategy has the rates
        self.server = Server(self.algorithm, w, buffers, share, local_lr=unused, global_lr=unused, update=self.server_update, **server)

    @property
    def server_update(self) -> str:
        """Whether the algorithm receives sums or means of the local gradients."""
        return self.update

    @property
    def w(self) -> Tensor:
        return self.server.w

    @property
    def buffers(self) -> dict[str, Tensor]:
        return self.server.buffers

    @property
    def model(self) -> tuple[Tensor, dict[str, Tensor]]:
        """What is evaluated and returned: the model and its buffers, or their running means."""
        return self.server.model

    def arrays(self) -> ArrayRecord:
        return self.layout.write(self.w, self.buffers)

    def row(self, client: str) -> int:
        """The client's row; a new client gets the next free one. Raises `Refused` if all `num_clients` rows are taken."""
        if client not in self._rows:
            row = self.clients.index("") if "" in self.clients else len(self.clients)
            if self.num_clients is not None and row == self.num_clients:
                raise Refused(f"num_clients={self.num_clients} other clients have already joined")
            self.clients[row : row + 1] = [client]
            self._rows[client] = row
            self._grow()
        return self._rows[client]

    def rename(self, client: str, new_id: str) -> None:
        """Give the row of a client to `new_id`. If that id has a row already, this one is free for the next client.

        A free row keeps what it holds, as if its client were absent: sums over all rows count it until another client's update replaces it.
        """
        if client in self._rows and new_id not in self._rows:
            self._rows[new_id] = row = self._rows.pop(client)
            self.clients[row] = new_id
        elif client in self._rows:
            self.clients[self._rows.pop(client)] = ""

    def take_over(self, departed: str, client: str) -> None:
        """Give a client what is stored for a departed one. If it has a row of its own, that gets the sum of both corrections."""
        if client in self._rows and (name := trait(self.algorithm, "conserved")):
            memory, rows = getattr(self.server.state, name), [self._rows[departed], self._rows[client]]
            held = memory[rows]
            memory[rows] = torch.stack([torch.zeros_like(held[0]), held.sum(dim=0)])
        self.rename(departed, client)

    def adopt(self, arrays: ArrayRecord) -> None:
        """Replace the model by one that was changed outside, by a subclass or a wrapper. Raises `UsageError` if it does not fit."""
        try:
            self.server.state.w, self.server.buffers = self.layout.read(arrays)
        except Refused as why:
            raise UsageError(f"the changed model does not fit: {why}") from None

    def _grow(self) -> None:
        while len(self.clients) > (rows := len(self.server.share)):
            self.server.grow(2 * rows, torch.ones(2 * rows))

    def run_round(self, loop: RoundLoop) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Run one round; returns the new model and the clients' metrics, as `aggregate_train` does."""
        return loop.exchange()

    def request(self, t: int, clients: list[str]) -> dict[str, tuple[dict[str, ArrayRecord], ConfigRecord]]:
        """Records and config that each client receives besides the model: SCAFFOLD's shift, FedProx's mu.

        A record "start" is sent in place of the global model.
        """
        rows = np.array([self.row(client) for client in clients], dtype=np.int64)
        given = self.server.request(t, rows).instructions
        extra: dict[str, Any] = {"proximal-mu": float(given.mu)} if given.mu else {}
        extra |= {"send": list(given.send)} if given.send else {}
        settings = config_record(extra | ({} if self.needs_g else {"send-update": False}))
        records: list[dict[str, ArrayRecord]] = [{} for _ in clients]
        for k, record in enumerate(records):
            if isinstance(given.shift, Tensor) or given.shift:
                shift = given.shift[k] if isinstance(given.shift, Tensor) else torch.full_like(self.w, given.shift)
                record["shift"] = vector("shift", shift)
            if given.start is not None:
                record["start"] = self.layout.write(given.start[k], self.buffers)
        return {client: (record, settings) for client, record in zip(clients, records, strict=True)}

    @property
    def send(self) -> tuple[str, ...]:
        """The names of the vectors that clients send besides g."""
        return self.server.send or ()

    @property
    def needs_g(self) -> bool:
        """Whether clients must send g, and not only the vectors that the instructions ask for."""
        return bool(trait(self.algorithm, "sends_g"))

    def check_reply(self, client: str, content: RecordDict) -> dict[str, str]:
        """What a reply holds besides the update: nothing in the server form. Raises `Refused` if it is unusable."""
        return {}

    def store_reply(self, client: str, control: dict[str, str]) -> None:
        """Keep what `check_reply` found in a reply whose update is valid."""

    def apply(self, t: int, updates: dict[str, Update], eta: float, eta_L: float) -> tuple[Step, Tensor]:
        """Aggregate the round's updates, ordered by client id so that the arrival order has no effect; returns what was aggregated."""
        clients = sorted(updates, key=natural_key)
        given = [updates[client] for client in clients]
        rows = np.array([self.row(client) for client in clients])
        g = stacked([u.g for u in given])
        g = g if self.robust is None else self.robust.apply(g, eta_L)
        K = torch.tensor([u.K for u in given], dtype=torch.float64)
        buffers = {name: torch.stack([u.buffers[name] for u in given]) for name in self.buffers}
        sent = {name: torch.stack([u.sent[name] for u in given]) for name in self.send}
        received = ClientUpdates(g, K, torch.zeros(len(given)), buffers, sent, finite=True)
        request = Request(t, rows, self._shares(clients, given).to(g.dtype), self.w, self.buffers, Instructions(), eta_L, eta)
        try:
            return self.server.apply(request, received)
        except Diverged:
            if bool(torch.isnan(K).any() and torch.isnan(self.w).any()):  # K was used
                silent = clients[int(torch.isnan(K).nonzero()[0])]
                raise UsageError(
                    f"{type(self.algorithm).__name__} uses the number of local steps, which client {silent} does not report; "
                    "send it as the metric 'steps' or use mimicfl.flower.client_app"
                ) from None
            raise

    def _shares(self, clients: list[str], given: list[Update]) -> Tensor:
        """Weights of the active clients among all N; algorithms that use only the active clients need just their proportions."""
        if self.weighting == "uniform":
            return torch.full((len(clients),), 1 / (self.num_clients or len(self.clients)), dtype=torch.float64)
        sizes = self.sizes or {client: update.samples for client, update in zip(clients, given, strict=True)}
        return torch.tensor([sizes[client] for client in clients], dtype=torch.float64) / sum(sizes.values())

    # -- on disk -------------------------------------------------------------------------------------------------

    def save(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        tickets = {"acknowledged": json.dumps(self.acknowledged)} if self.acknowledged else {}
        return self.server.tensors(), {"clients": json.dumps(self.clients)} | tickets

    def changed(self) -> dict[str, set[int]]:
        """The clients whose rows have changed, per memory; the sets are cleared once they are saved."""
        return {f"state.{name}": v.changed for name, v in vars(self.server.state).items() if isinstance(v, ClientMemory)}

    def load(self, tensors: dict[str, Tensor], facts: dict[str, str], where: object) -> None:
        """Continue from what `save` returned, after `begin`."""
        self.clients = json.loads(facts["clients"])
        self._rows = {client: row for row, client in enumerate(self.clients) if client}
        self.acknowledged = json.loads(facts.get("acknowledged", "{}"))
        self._grow()
        self.server.restore(tensors, where)
        for clients in self.changed().values():
            clients.clear()
