"""The server's memory between rounds: the algorithm's own state, and which of its rows belongs to whom.

`ServerForm` keeps everything here, so clients may forget. It calls the same `init`, `task` and `aggregate` as the simulator.
"""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from .. import algorithms
from ..algorithms.base import pack, unpack
from ..errors import UsageError
from ..params import average_buffers
from ..rows import Rows
from .wire import Layout, Refused, Update, config, vector

if TYPE_CHECKING:
    from .loop import Loop

OPEN = (algorithms.FedAvg, algorithms.FedAvgM, algorithms.MimiC)  # means over S_t only: the population may grow while they run


def natural(client: str) -> list[Any]:
    """Sort key under which client 10 follows client 9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", client) if part]


class ServerForm:
    """State, roster and buffers of one federation."""

    name = "server"
    experiment = ""

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
        self.open = type(algorithm) in (*OPEN, algorithms.FedProx)
        label = type(algorithm).__name__
        if not self.open and num_clients is None:
            raise UsageError(f"{label} may weigh by, or keep, all N clients and must know how many there are: pass num_clients=N")
        if not self.open and weighting == "samples" and sizes is None:
            raise UsageError(f"{label} weighs all clients, absent ones too: pass sizes={{client: samples}}, or weighting='uniform'")
        self.clients: list[str] = []  # whose row is which, in order of appearance
        self.buffers: dict[str, Tensor] = {}

    def begin(self, layout: Layout, arrays: ArrayRecord) -> None:
        self.layout = layout
        try:
            w, self.buffers = layout.read(arrays)
        except Refused as reason:
            raise UsageError(f"the initial arrays cannot be used: {reason}") from None
        self.clients = []
        self.state = self.algorithm.init(w, self.num_clients or 1)
        self.held = self.num_clients or 1  # rows there are

    @property
    def w(self) -> Tensor:
        return self.state.w  # type: ignore[no-any-return]

    def arrays(self) -> ArrayRecord:
        return self.layout.write(self.w, self.buffers)

    def row(self, client: str) -> int:
        """The client's row; a new client gets the next one, if the algorithm can have it."""
        if client not in self.clients:
            if self.num_clients is not None and len(self.clients) == self.num_clients:
                raise Refused(f"it would be client {self.num_clients + 1} of {self.num_clients}")
            self.clients.append(client)
            if len(self.clients) > self.held:
                self._grow(2 * self.held)
        return self.clients.index(client)

    def rename(self, client: str, told: str) -> None:
        """A client that was never counted turns out to be another: its row is that one's, unless that one has a row."""
        if client in self.clients and told not in self.clients:
            self.clients[self.clients.index(client)] = told

    def _grow(self, rows: int) -> None:
        """Room for more clients; what has no row per client is kept as it is."""
        grown = self.algorithm.init(self.w, rows)
        for name, value in vars(self.state).items():
            if isinstance(value, Rows):
                getattr(grown, name).restore(*value.tensors().values())
            else:
                setattr(grown, name, value)
        self.state, self.held = grown, rows

    def run_round(self, loop: "Loop", clients: dict[str, int]) -> None:
        """One round with these clients: here, letters out and answers in."""
        loop.exchange(clients)

    def ask(self, clients: list[str]) -> dict[str, tuple[dict[str, ArrayRecord], ConfigRecord]]:
        """What goes to each client besides the model: SCAFFOLD's shift, FedProx's mu."""
        rows = torch.tensor([self.row(client) for client in clients], dtype=torch.int64)
        task = algorithms.checked_task(self.algorithm.task(self.state, rows), self.state.w, len(rows), self.algorithm)
        words = config({"proximal-mu": float(task.mu)} if task.mu else {})
        shifts = task.shift if isinstance(task.shift, Tensor) else None
        return {c: ({} if shifts is None else {"shift": vector("shift", shifts[k])}, words) for k, c in enumerate(clients)}

    def hear(self, client: str, content: RecordDict) -> None:
        """What an answer says of its client besides the update: here, nothing."""

    def tell(self, t: int, updates: dict[str, Update], eta: float, eta_L: float) -> None:
        """The round's updates reach the algorithm, in the order of their clients' names: the order they came in means nothing."""
        clients, rows = self.ordered(updates)
        g, K, share, weights = self.stacked(clients, updates)
        if self.update == "mean":
            g = g / K[:, None].to(g.dtype)
        self.state = self.algorithm.aggregate(self.state, rows, g, algorithms.Step(t, eta, eta_L, K, weights, share, self.update))
        if bool(torch.isnan(K).any()) and bool(torch.isnan(self.w).any()):
            silent = clients[int(torch.isnan(K).nonzero()[0])]
            raise UsageError(
                f"{type(self.algorithm).__name__} uses the number of local steps, which client {silent} does not tell: "
                "let clients send it as the metric 'steps', or use mimicfl.flower.client_app"
            )
        self.merge_buffers(clients, updates, weights)

    def ordered(self, updates: dict[str, Update]) -> tuple[list[str], Tensor]:
        clients = sorted(updates, key=natural)
        return clients, torch.tensor([self.row(client) for client in clients])

    def stacked(self, clients: list[str], updates: dict[str, Update]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """g [m, d], K [m], shares of the population [m], weights among the active [m]."""
        given = [updates[client] for client in clients]
        g, K = torch.stack([u.g for u in given]), torch.tensor([u.K for u in given], dtype=torch.float64)
        share = self._shares(clients, given).to(g.dtype)
        return g, K, share, share / share.sum()

    def merge_buffers(self, clients: list[str], updates: dict[str, Update], weights: Tensor) -> None:
        if self.buffers:
            stacked = {name: torch.stack([updates[client].buffers[name] for client in clients]) for name in self.buffers}
            self.buffers = average_buffers(stacked, weights)

    def _shares(self, clients: list[str], given: list[Update]) -> Tensor:
        """Weights among all clients; where the algorithm looks at the active ones only, their proportions are enough."""
        if self.weighting == "uniform":
            return torch.full((len(clients),), 1 / (self.num_clients or len(self.clients)), dtype=torch.float64)
        sizes = self.sizes or {client: update.samples for client, update in zip(clients, given, strict=True)}
        return torch.tensor([sizes[client] for client in clients], dtype=torch.float64) / sum(sizes.values())

    # -- on disk -------------------------------------------------------------------------------------------------

    def save(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        tensors = pack(self.state) | {f"buffer.{name}": value for name, value in self.buffers.items()}
        return tensors, {"clients": json.dumps(self.clients)}

    def load(self, tensors: dict[str, Tensor], facts: dict[str, str], where: object) -> None:
        """Go on from what `save` gave; `begin` has made the shapes."""
        self.clients = json.loads(facts["clients"])
        while self.held < len(self.clients):
            self._grow(2 * self.held)
        unpack(self.state, tensors, where)
        self.buffers = {name: tensors[f"buffer.{name}"] for name in self.buffers}
