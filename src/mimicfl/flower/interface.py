"""Protocols: what the round loop needs from a strategy, and what a form and the selection of clients need from the round loop."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import nn

from ..callbacks.interface import CallbackSet
from .clock import Clock
from .messages import Messages, SentMessage
from .replies import Update
from .roster import Roster
from .round_record import Round


class Strategy(Protocol):
    """What the round loop needs from a strategy: its options, its form, and the steps of a round."""

    form: Any
    algorithm: Any
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    folder: Any
    pattern: Any
    class_counts: Any
    num_clients: int | None
    seed: int
    wait_for: int
    enough: int | float | None
    late: str
    query_ids: bool
    patience: float | None
    poll: float | None
    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    failures: Any
    save_every: tuple[int, float]
    keep_checkpoints: int
    bound: Any
    callbacks: CallbackSet
    model: Callable[[], nn.Module] | None

    @property
    def keeps_replies(self) -> bool: ...

    def begin(self, initial_arrays: ArrayRecord) -> None: ...

    def summary(self) -> None: ...

    def hand_out(self) -> ArrayRecord: ...

    def evaluated(self, arrays: ArrayRecord) -> ArrayRecord: ...

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]: ...

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]: ...

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]: ...

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None: ...

    def request(self, t: int, clients: list[str], arrays: ArrayRecord, config: Mapping[str, Any]) -> tuple[Any, dict[str, RecordDict]]: ...

    def sent_with(self, message: Message) -> SentMessage: ...

    def read(self, sent: SentMessage, reply: Message) -> Update: ...

    def arrived(self, sent: SentMessage, reply: Message, update: Update) -> None: ...

    def global_rate(self, t: int, active: int, eta_L: float) -> float: ...


class RoundLoop(Protocol):
    """What forms and the selection of clients need from the round loop."""

    strategy: Strategy
    round: Round
    messages: Messages
    roster: Roster
    clock: Clock
    timeout: float
    train_config: ConfigRecord
    arrays: ArrayRecord
    first: int
    available: np.ndarray | None

    def exchange(self) -> tuple[ArrayRecord | None, MetricRecord | None]: ...

    def collect(self, kind: str = "") -> list[tuple[SentMessage, Message]]: ...

    def admit(self, client: str) -> bool: ...

    def count_download(self, content: RecordDict) -> None: ...
