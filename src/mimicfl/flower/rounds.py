"""The steps of a round on Flower: requests, checked replies, aggregation, evaluation.

mimicfl's round loop calls them, and so do the methods of Flower's strategies (`strategy_methods.py`). `strategy.py` has the options.
"""

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import Tensor

from ..algorithms.base import Algorithm
from ..algorithms.server_optimizers import ServerOptimizer
from ..errors import UsageError
from ..registry import is_built_in
from .compression import Compression
from .messages import RoundRequest, SentMessage, reason
from .names import natural_key
from .replies import Update, read_update
from .robust import NormBound
from .wire import Layout, Refused


class RoundSteps(FlowerFedAvg):
    """What a strategy does in a round. `Federated` sets the attributes."""

    algorithm: Algorithm[Any]
    form: Any
    local_lr: Callable[[int, int], float] | None
    global_lr: Callable[[int, int], float] | None
    server_optimizer: ServerOptimizer | None
    average: float
    needs_steps: bool
    late: str
    seed: int
    buffers: tuple[str, ...]
    pattern: Any
    bound: NormBound
    compression: Compression | None
    _matrix: Tensor | None  # [m, d] the updates of a round
    _model: ArrayRecord | None  # the record of the current model, as last handed out

    def begin(self, initial_arrays: ArrayRecord) -> None:
        """Initialise the state from the initial model."""
        warm_start = self.pattern is not None and self.pattern.warm_start
        layout = Layout.of(initial_arrays, self.buffers)
        self.form.begin(layout, initial_arrays, optimizer=self.server_optimizer, average=self.average, warm_start=warm_start)
        self._model = initial_arrays
        self.bound.last = {}

    def hand_out(self) -> ArrayRecord:
        """The record of the global model, handed out for the next round."""
        self._model = self.form.arrays()
        return self._model

    def evaluated(self, arrays: ArrayRecord) -> ArrayRecord:
        """What is evaluated and returned after a round that ended with the global model `arrays`: this model, or the running mean."""
        if not self.average:
            return arrays
        if not self.form.own_exchange:
            self._check_unchanged(arrays)
        return self.form.layout.write(*self.form.model)  # type: ignore[no-any-return]

    def _check_unchanged(self, arrays: ArrayRecord) -> None:
        if self.average and arrays is not self._model:
            raise UsageError("the model was changed after the server step, which a mean of the models would undo; use average=0")

    def request(
        self, t: int, clients: list[str], arrays: ArrayRecord, config: Mapping[str, Any]
    ) -> tuple[RoundRequest, dict[str, RecordDict]]:
        """What round t sends, and the message content per client."""
        given = config.get("lr")
        configured = float(given) if isinstance(given, (int, float)) and given > 0 else 1.0
        eta_L = configured if self.local_lr is None else self.local_lr(t, max(1, len(clients)))
        train_config = dict(config) | {"server-round": t + 1, "seed": self.seed}
        if self.local_lr is not None:
            train_config["lr"] = eta_L
        w, _ = self.form.layout.read(arrays)
        contents: dict[str, RecordDict] = {}
        starts, ticket = {}, secrets.token_hex(6) if self.compression else ""
        shared: dict[int, RecordDict] = {}  # clients that get the same get one record, as in Flower
        for client, (records, settings) in self.form.request(t, clients).items():
            model = records.pop("start", arrays)
            if model is not arrays:
                starts[client], _ = self.form.layout.read(model)
            if records or starts or ticket or id(settings) not in shared:
                config_record = ConfigRecord(train_config | dict(settings) | self._compressed(client, ticket))
                shared[id(settings)] = RecordDict({self.arrayrecord_key: model, self.configrecord_key: config_record, **records})
            contents[client] = shared[id(settings)]
        per_client = any(len(content) > 2 for content in contents.values()) or bool(starts)
        return RoundRequest(t, w, eta_L, starts, self._places(list(contents)), ticket, per_client), contents

    def _compressed(self, client: str, ticket: str) -> dict[str, str]:
        """What a client needs to compress its update: how, and which of its replies was aggregated last."""
        if self.compression is None:
            return {}
        counted = self.form.acknowledged.get(client, "")
        return {"compress": self.compression.spec, "ticket": ticket, "counted": counted, "experiment": self.form.experiment}

    def _places(self, clients: list[str]) -> dict[str, Tensor]:
        """Where the updates of a round are written: the rows of one matrix, in the order in which they are aggregated."""
        if self.form.own_exchange or not clients:
            return {}
        shape = (len(clients), self.form.layout.size)
        matrix = self._matrix if self._matrix is not None and self._matrix.shape == shape else None
        # Reused from round to round if nothing can still refer to it: neither late replies nor a custom algorithm.
        if matrix is None or self.late == "count" or not is_built_in(type(self.algorithm)):
            matrix = self._matrix = torch.empty(shape, dtype=self.form.layout.dtype)
        return {client: matrix[k] for k, client in enumerate(sorted(clients, key=natural_key))}

    def read(self, sent: SentMessage, reply: Message) -> Update:
        """The update in a reply. Raises `Refused` with the reason if it must not be aggregated; nothing is stored then."""
        if reply.has_error():
            raise Refused(reason(reply))
        request, control = sent.details, self.form.check_reply(sent.client, reply.content)
        start = request.starts.get(sent.client, request.w)
        place = request.places.pop(sent.client, None)  # once: a second reply must not overwrite the first
        how = (request.eta_L, self.needs_steps, self.weighted_by_key, self.form.send, place, self.form.needs_g, self.compression)
        update = read_update(reply.content, self.form.layout, start, *how)
        if why := self.bound.check_fixed(update, request.eta_L):
            raise Refused(why)
        self.form.store_reply(sent.client, control)
        return dataclasses.replace(update, ticket=request.ticket) if request.ticket else update

    def apply(self, t: int, eta_L: float, updates: dict[str, Update]) -> float:
        """Aggregate the updates of a round; returns eta_t."""
        eta = self.global_rate(t, len(updates), eta_L)
        if updates:
            self.form.apply(t, updates, eta, eta_L)
            self.form.acknowledged |= {client: update.ticket for client, update in updates.items() if update.ticket}
        return eta

    def global_rate(self, t: int, active: int, eta_L: float) -> float:
        """The server's learning rate eta_t in round t."""
        return eta_L if self.global_lr is None else self.global_lr(t, active)
