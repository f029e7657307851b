"""Strategies for Flower's ServerApp that survive dropouts: `MimiC()` stands where `FedAvg()` stood.

They take the options of Flower's own FedAvg beside ours, work with unmodified ClientApps that return trained weights, and bring
their own round loop (`loop.py`) behind the same `start(grid, initial_arrays, num_rounds, ...)`.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result
from torch import Tensor

from .. import algorithms
from .. import availability as patterns
from ..errors import UsageError, number, one_of, whole
from ..local.lr import RATES, schedule
from ..registry import describe
from .loop import Loop
from .post import Post, Sent, reason
from .roster import Roster
from .server import ServerForm
from .wire import BUFFERS, Layout, Refused, Update, read_update

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Asked:
    """What a round's letters said; a late answer is measured against this, never against the model of the day."""

    t: int
    w: Tensor  # [d] as it was sent
    eta_L: float


class Federated(FlowerFedAvg):
    """Any algorithm of mimicfl as a Flower strategy.

    algorithm      a name (`mimic`, `fedprox:mu=0.1`) or an object
    lr             the clients' rate, a schedule; it travels in the train config as "lr" and rescales what is remembered. None: the
                   "lr" of the train config, taken as constant
    global_lr      eta_t; "local" follows the clients' rate, so that FedAvg is plain model averaging
    num_clients    N; MIFA, FedVARP, FedAU and SCAFFOLD must know it
    wait_for       the first round begins when so many clients are there
    enough         a round closes when so many answers are in (a count, or a share of those asked); None: all
    late           "refuse" answers that come after their round has closed, or "count" them in the round they come in
    max_norm       refuse updates that move the model farther than this
    folder         checkpoints and rows; started again with the same folder, it goes on where it was
    availability   a pattern that decides who is asked when, for studies in Flower's simulation; label-correlated ones need
                   class_counts [N, classes]
    patience       seconds to wait for clients before giving up; None: for ever
    poll           seconds between polls for answers; None: 0.2 on a network, 0.02 in Flower's simulation
    client_ids     "hello": ask nodes who they are; "node": go by node id, which authentication keys make stable
    form           an object that holds the state, see `ServerForm`; others: `ClientForm`, `SecureForm`
    Further options are those of Flower's FedAvg.
    """

    def __init__(
        self,
        algorithm: Any = "mimic",
        *,
        lr: Any = None,
        global_lr: Any = "local",
        update: str = "sum",
        weighting: str = "uniform",
        num_clients: int | None = None,
        sizes: Mapping[str, float] | None = None,
        wait_for: int | None = None,
        enough: int | float | None = None,
        late: str = "refuse",
        max_norm: float | None = None,
        folder: str | Path | None = None,
        availability: Any = None,
        class_counts: Any = None,
        client_ids: str = "hello",
        buffers: Sequence[str] = BUFFERS,
        form: Any = None,
        seed: int = 0,
        patience: float | None = None,
        poll: float | None = None,
        **flower: Any,
    ) -> None:
        super().__init__(**({"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1} | flower))
        self.algorithm = algorithms.make(algorithm)
        self.local_lr = None if lr is None else schedule(lr)
        self.global_lr = None if isinstance(global_lr, str) and global_lr == "local" else schedule(global_lr)
        one_of("update", update, ["sum", "mean"])
        one_of("weighting", weighting, ["uniform", "samples"])
        self.needs_steps = update == "mean" or isinstance(self.algorithm, algorithms.SCAFFOLD)  # what a mean gradient is made with
        self.num_clients = num_clients if num_clients is None else whole("num_clients", num_clients)
        self.wait_for = whole("wait_for", wait_for or self.min_available_nodes)
        self.enough = _enough(enough)
        self.late = one_of("late", late, ["refuse", "count"])
        self.max_norm = max_norm if max_norm is None else number("max_norm", max_norm, low=0, open_low=True)
        self.folder, self.buffers, self.seed = folder, tuple(buffers), whole("seed", seed, low=0)
        self.ask_names = one_of("client_ids", client_ids, ["hello", "node"]) == "hello"
        self.patience = patience if patience is None else number("patience", patience, low=0)
        self.poll = poll if poll is None else number("poll", poll, low=0, open_low=True)
        self.pattern = None if availability is None else patterns.make(availability)
        self.class_counts = None if class_counts is None else np.asarray(class_counts)
        if self.pattern is not None and self.num_clients is None:
            raise UsageError("an availability pattern needs num_clients=N: it says who of N is there")
        self.form = form or ServerForm(self.algorithm, update=update, weighting=weighting, num_clients=self.num_clients, sizes=sizes)
        mimic = isinstance(self.algorithm, algorithms.MimiC) and self.algorithm.memory == "gradient"
        if self.form.name != ServerForm.name and not mimic:
            raise UsageError(f"form {self.form.name!r} is MimiC's, with memory in gradient units: use algorithm mimic, or form 'server'")
        if self.form.update != update:
            raise UsageError(f"update is {self.form.update!r} in the form and {update!r} in the strategy: give both the same")
        self.words = {
            "source": "flower",
            "algorithm": describe(algorithms.ALGORITHMS, self.algorithm),
            "form": self.form.name,
            "lr": "constant" if self.local_lr is None else describe(RATES, self.local_lr),
            "global_lr": "local" if self.global_lr is None else describe(RATES, self.global_lr),
            "update": update,
            "weighting": weighting,
            "seed": self.seed,
        } | ({} if num_clients is None else {"num_clients": num_clients})
        self.rows: list[dict[str, Any]] = []  # what became of each round, as in the folder's rows.jsonl
        self._asked: dict[str, tuple[Message, Sent]] = {}  # of Flower's own loop
        self._roster: Roster | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """As Flower's own; a round lasts at most `timeout` seconds."""
        loop = Loop(self, grid, timeout, train_config, evaluate_config, evaluate_fn)
        return loop.run(initial_arrays, whole("num_rounds", num_rounds))

    # -- a round, whoever's loop it is ---------------------------------------------------------------------------

    def begin(self, initial_arrays: ArrayRecord) -> None:
        self.form.begin(Layout.of(initial_arrays, self.buffers), initial_arrays)

    def ask(self, t: int, clients: list[str], arrays: ArrayRecord, config: Mapping[str, Any]) -> tuple[Asked, dict[str, RecordDict]]:
        """The letters of round t."""
        told = config.get("lr")
        own = float(told) if isinstance(told, (int, float)) and told > 0 else 1.0
        eta_L = own if self.local_lr is None else self.local_lr(t, max(1, len(clients)))
        words = dict(config) | {"server-round": t + 1, "seed": self.seed}
        if self.local_lr is not None:
            words["lr"] = eta_L
        w, _ = self.form.layout.read(arrays)
        letters = {}
        for client, (extra, more) in self.form.ask(clients).items():
            config_record = ConfigRecord(words | dict(more))
            letters[client] = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config_record, **extra})
        return Asked(t, w, eta_L), letters

    def read(self, sent: Sent, reply: Message) -> Update:
        """An answer as an update, checked; `Refused` says what is wrong with it."""
        if reply.has_error():
            raise Refused(reason(reply))
        self.form.hear(sent.client, reply.content)
        return read_update(reply.content, self.form.layout, sent.about.w, sent.about.eta_L, self.max_norm, self.needs_steps)

    def tell(self, t: int, eta_L: float, updates: dict[str, Update]) -> float:
        """The updates of a round reach the algorithm; returns eta_t."""
        eta = eta_L if self.global_lr is None else self.global_lr(t, len(updates))
        if updates:
            self.form.tell(t, updates, eta, eta_L)
        return eta

    def metrics(self, contents: list[RecordDict]) -> MetricRecord | None:
        """The clients' metrics, averaged as Flower does, where all report the same ones."""
        told = [list(content.metric_records.values()) for content in contents]
        alike = told and all(len(r) == 1 and self.weighted_by_key in r[0] and r[0].keys() == told[0][0].keys() for r in told if r)
        return self.train_metrics_aggr_fn(contents, self.weighted_by_key) if alike and all(told) else None

    # -- Flower's own loop ---------------------------------------------------------------------------------------

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """For those who drive the strategy themselves; `start` does not come by here."""
        if not hasattr(self.form, "layout"):
            self.begin(arrays)
        if self._roster is None or self._roster.grid is not grid:
            self._roster = Roster(grid, Post(grid, self.poll), self.ask_names)
        roster, post = self._roster, self._roster.post
        need = self.wait_for if server_round == 1 else self.min_train_nodes
        while True:
            roster.refresh()
            for sent, reply in post.collect():
                roster.hear(sent, reply)
            if len(idle := roster.idle()) >= need and not post.under_way:
                break
            post.clock.wait()
        asked, letters = self.ask(server_round - 1, sorted(idle), arrays, config)
        self._asked = {}
        messages = []
        for client, content in letters.items():
            sent = Sent(idle[client], client, "train", asked.t, asked)
            message = Message(content, sent.node, MessageType.TRAIN, group_id=str(server_round))
            messages.append(message)
            self._asked[client] = (message, sent)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        by_id = {message.metadata.message_id: sent for message, sent in self._asked.values()}  # the push has filled the ids in
        updates, contents, eta_L = {}, [], 1.0
        for reply in replies:
            sent = by_id.get(reply.metadata.reply_to_message_id)
            if sent is None:
                continue
            try:
                updates[sent.client] = self.read(sent, reply)
                contents.append(reply.content)
                eta_L = sent.about.eta_L
            except Refused as why:
                log.warning("round %s: client %s is left out: %s", server_round, sent.client, why)
        self.tell(server_round - 1, eta_L, updates)
        return (self.form.arrays(), self.metrics(contents)) if updates else (None, None)


def _enough(given: Any) -> int | float | None:
    """A count of answers, or a share of those asked."""
    if given is None or isinstance(given, int):
        return None if given is None else whole("enough", given)
    return number("enough, as a share,", given, low=0, high=1, open_low=True)


class FedAU(Federated):
    def __init__(self, cutoff: int = 50, **options: Any) -> None:
        super().__init__(algorithms.FedAU(cutoff), **options)


class FedAvg(Federated):
    def __init__(self, **options: Any) -> None:
        super().__init__(algorithms.FedAvg(), **options)


class FedAvgM(Federated):
    def __init__(self, momentum: float = 0.9, damped: bool = True, **options: Any) -> None:
        super().__init__(algorithms.FedAvgM(momentum, damped), **options)


class FedProx(Federated):
    """mu travels as `proximal-mu`; the clients must use it (`client_app` does)."""

    def __init__(self, mu: float = 0.01, **options: Any) -> None:
        super().__init__(algorithms.FedProx(mu), **options)


class MimiC(Federated):
    def __init__(self, memory: str = "gradient", **options: Any) -> None:
        super().__init__(algorithms.MimiC(memory), **options)


class MIFA(Federated):
    def __init__(self, never_seen: str = "zero", memory: str = "gradient", **options: Any) -> None:
        super().__init__(algorithms.MIFA(never_seen, memory), **options)


class FedVARP(Federated):
    def __init__(self, **options: Any) -> None:
        super().__init__(algorithms.FedVARP(), **options)


class SCAFFOLD(Federated):
    """Needs a client that takes the shift (`client_app` does): an unmodified one would train as in FedAvg."""

    def __init__(self, **options: Any) -> None:
        super().__init__(algorithms.SCAFFOLD(), **options)
