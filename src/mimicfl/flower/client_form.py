"""The client form of MimiC: each client stores its correction c_i and sends g_i + c_i; the server needs only their mean.

The server keeps v_t until every client aggregated in round t has committed its correction. The result equals that of the server
form bit for bit, since both compute the same sums in the same order.

If a client loses its state, the corrections no longer sum to zero over all clients, and MimiC would converge to a wrong point. The
server then starts a new epoch, in which all clients restart from c = 0.
"""

import json
import secrets
from collections import Counter
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from .. import algorithms
from ..algorithms.base import Step
from .client_state import is_lost
from .replies import Update
from .server_form import ServerForm
from .wire import LONGEST, MIMICFL, Layout, Refused, config_record, read_config, vector

MOST_LOSSES = 2  # per client and run; a client that loses its correction again and again must not hold up all others


class ClientForm(ServerForm):
    """The server holds the model and tracks which corrections are committed; clients hold the corrections."""

    name = "client"

    def __init__(self, *, update: str = "sum", weighting: str = "uniform", num_clients: int | None = None) -> None:
        # Given corrected updates, the server step is that of FedAvg: w - eta_t times their mean.
        super().__init__(algorithms.FedAvg(), update=update, weighting=weighting, num_clients=num_clients)

    def begin(self, layout: Layout, arrays: ArrayRecord, **server: Any) -> None:
        super().begin(layout, arrays, **server)
        self.epoch = secrets.token_hex(6)
        self.token = ""
        self.v: dict[int, Tensor] = {}  # t -> v_t, while a client still needs it
        self.counted: dict[str, tuple[str, int]] = {}  # client -> token and round of its last aggregated reply
        self.committed: dict[str, str] = {}  # client -> token of the reply that its correction was computed from
        self.reply_tokens: dict[str, str] = {}  # client -> token of its current reply
        self.lost: set[str] = set()
        self.losses: Counter[str] = Counter()  # client -> how often its loss made all clients restart

    @property
    def server_update(self) -> str:
        return "sum"  # under update="mean" the clients divide by K themselves

    def request(self, t: int, clients: list[str]) -> dict[str, tuple[dict[str, ArrayRecord], ConfigRecord]]:
        self._reset_after_loss()
        self.token = secrets.token_hex(6)
        return {client: (self._records(client), ConfigRecord()) for client in clients}

    def _records(self, client: str) -> dict[str, Any]:
        """The records of this client's request: the round token, the last acknowledged reply, and v_t if it must still commit."""
        self.row(client)
        acknowledged, t = self.counted.get(client, ("", -1))
        control = {"experiment": self.experiment, "epoch": self.epoch, "ticket": self.token, "counted": acknowledged, "update": self.update}
        records: dict[str, Any] = {MIMICFL: config_record({**control, **self._extra_config()})}
        if acknowledged and self.committed.get(client) != acknowledged:
            records["v"] = vector("v", self.v[t])
        return records

    def _extra_config(self) -> dict[str, float]:
        return {}

    def check_reply(self, client: str, content: RecordDict) -> dict[str, str]:
        if self.losses[client] > MOST_LOSSES:
            raise Refused(f"it has lost its correction more than {MOST_LOSSES} times; it no longer participates")
        if is_lost(content):
            if client in self.counted and client not in self.lost:  # else the server relies on nothing that it could have lost
                self.lost.add(client)
                self.losses[client] += 1
            raise Refused("it has lost its correction; all clients restart from c = 0")
        control = read_config(content, MIMICFL)
        found = {key: control.get(key) for key in ("ticket", "committed")}
        if not all(isinstance(value, str) and len(value) <= LONGEST for value in found.values()):
            raise Refused("it does not say which correction it stores; the client form needs mimicfl.flower.client_app")
        return found  # type: ignore[return-value]

    def store_reply(self, client: str, control: dict[str, str]) -> None:
        self.reply_tokens[client], self.committed[client] = control["ticket"], control["committed"]

    def apply(self, t: int, updates: dict[str, Update], eta: float, eta_L: float) -> tuple[Step, Tensor]:
        step, g = super().apply(t, updates, eta, eta_L)
        self.acknowledge(t, list(updates), step.mean(g))  # v_t: the updates are already corrected
        return step, g

    def acknowledge(self, t: int, clients: list[str], v: Tensor) -> None:
        """Record whose replies were aggregated in round t, keep v_t for them, and free vectors that no client needs any more."""
        self.v[t] = v
        for client in clients:
            self.counted[client] = (self.reply_tokens[client], t)
        needed = {round_ for client, (token, round_) in self.counted.items() if self.committed.get(client) != token}
        self.v = {round_: v for round_, v in self.v.items() if round_ in needed}

    def _reset_after_loss(self) -> None:
        """Start a new epoch if a client has lost its correction."""
        if self.lost:
            self.epoch = secrets.token_hex(6)
            for records in (self.v, self.counted, self.committed, self.lost):
                records.clear()

    # -- on disk -------------------------------------------------------------------------------------------------

    def save(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        tensors, facts = super().save()
        ledger = {"epoch": self.epoch, "counted": self.counted, "committed": self.committed, "losses": dict(self.losses)}
        return tensors | {f"v.{t}": v for t, v in self.v.items()}, facts | {"ledger": json.dumps(ledger)}

    def load(self, tensors: dict[str, Tensor], facts: dict[str, str], where: object) -> None:
        super().load(tensors, facts, where)
        ledger = json.loads(facts["ledger"])
        self.epoch, self.committed = ledger["epoch"], ledger["committed"]
        self.losses = Counter(ledger.get("losses", {}))
        self.counted = {client: (token, t) for client, (token, t) in ledger["counted"].items()}
        self.v = {int(name.removeprefix("v.")): value for name, value in tensors.items() if name.startswith("v.")}
