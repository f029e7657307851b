"""The client form of MimiC: each client keeps its own correction and sends g_i + c_i, so the server needs only their mean.

The server keeps v_t of the rounds whose counted clients may not have committed yet, each once, and frees it when nobody needs
it. The result is that of the server form to the bit, since both do the same sums in the same order.

A client that has lost its disk leaves a hole: the corrections no longer sum to zero over all clients, and MimiC would come to
rest in the wrong place for ever. So the server then begins a new epoch, in which everybody starts again from c = 0.
"""

import json
import secrets
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from .. import algorithms
from .held import is_lost
from .server import ServerForm
from .wire import OURS, Layout, Refused, Update, config, vector, words


class ClientForm(ServerForm):
    """Model and ledger on the server, corrections at the clients."""

    name = "client"

    def __init__(self, *, update: str = "sum", weighting: str = "uniform", num_clients: int | None = None) -> None:
        # The server's step on what it receives is FedAvg's: w - eta_t times the mean of the corrected updates.
        super().__init__(algorithms.FedAvg(), update=update, weighting=weighting, num_clients=num_clients)

    def begin(self, layout: Layout, arrays: ArrayRecord) -> None:
        super().begin(layout, arrays)
        self.epoch = secrets.token_hex(6)
        self.ticket = ""
        self.v: dict[int, Tensor] = {}  # t -> v_t, while a client may still need it
        self.counted: dict[str, tuple[str, int]] = {}  # client -> ticket and round of its last counted answer
        self.committed: dict[str, str] = {}  # client -> ticket that it is known to have committed
        self.echo: dict[str, str] = {}  # client -> ticket of the answer now in hand
        self.lost: set[str] = set()

    def ask(self, clients: list[str]) -> dict[str, tuple[dict[str, ArrayRecord], ConfigRecord]]:
        self._mend()
        self.ticket = secrets.token_hex(6)
        return {client: (self._letter(client), ConfigRecord()) for client in clients}

    def _letter(self, client: str) -> dict[str, Any]:
        self.row(client)
        ticket, t = self.counted.get(client, ("", -1))
        told = {"experiment": self.experiment, "epoch": self.epoch, "ticket": self.ticket, "counted": ticket, "update": self.update}
        letter: dict[str, Any] = {OURS: config({**told, **self._more()})}
        if ticket and self.committed.get(client) != ticket:
            letter["v"] = vector("v", self.v[t])
        return letter

    def _more(self) -> dict[str, float]:
        return {}

    def hear(self, client: str, content: RecordDict) -> None:
        if is_lost(content):
            self.lost.add(client)
            raise Refused("it has lost its correction: everybody starts again from zero")
        said = words(content, OURS)
        if "ticket" not in said:
            raise Refused("it does not keep a correction: the client form needs mimicfl.flower.client_app")
        self.echo[client], self.committed[client] = str(said["ticket"]), str(said["committed"])

    def tell(self, t: int, updates: dict[str, Update], eta: float, eta_L: float) -> None:
        clients, _ = self.ordered(updates)
        g, _, _, weights = self.stacked(clients, updates)
        v = weights @ g  # v_t: the clients have corrected their updates themselves
        self.count(t, clients, v, eta)
        self.merge_buffers(clients, updates, weights)

    def count(self, t: int, clients: list[str], v: Tensor, eta: float) -> None:
        """v_t moves the model and goes into the ledger for those it was made of."""
        self.state.w = self.state.w - eta * v
        self.v[t] = v
        for client in clients:
            self.counted[client] = (self.echo[client], t)
        needed = {round_ for client, (ticket, round_) in self.counted.items() if self.committed.get(client) != ticket}
        self.v = {round_: v for round_, v in self.v.items() if round_ in needed}

    def _mend(self) -> None:
        """After a loss: a new epoch, with nobody counted yet."""
        if self.lost:
            self.epoch = secrets.token_hex(6)
            for memory in (self.v, self.counted, self.committed, self.lost):
                memory.clear()

    # -- on disk -------------------------------------------------------------------------------------------------

    def save(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        tensors, facts = super().save()
        ledger = {"epoch": self.epoch, "counted": self.counted, "committed": self.committed}
        return tensors | {f"v.{t}": v for t, v in self.v.items()}, facts | {"ledger": json.dumps(ledger)}

    def load(self, tensors: dict[str, Tensor], facts: dict[str, str], where: object) -> None:
        super().load(tensors, facts, where)
        ledger = json.loads(facts["ledger"])
        self.epoch, self.committed = ledger["epoch"], ledger["committed"]
        self.counted = {client: (ticket, t) for client, (ticket, t) in ledger["counted"].items()}
        self.v = {int(name.removeprefix("v.")): value for name, value in tensors.items() if name.startswith("v.")}
