"""Flower strategies for clients that drop out: replace `FedAvg()` in a ServerApp by `MimiC()`.

They accept the options of Flower's FedAvg, also by position, and their own, and work with unmodified ClientApps that return weights.
`start(grid, initial_arrays, num_rounds, ...)` has Flower's signature and runs mimicfl's round loop (`loop.py`), which calls the methods
that Flower's loop calls. Flower's loop and wrappers such as differential privacy may call them, too.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import nn

from .. import algorithms
from .. import participation as patterns
from ..algorithms import server_optimizers
from ..algorithms.server_optimizers import SERVER_OPTIMIZERS
from ..callbacks.interface import callback_set
from ..clients.lr import RATES, schedule
from ..errors import UsageError, integer, number, one_of
from ..registry import describe
from ..settings import check
from .compression import Compression
from .failed_rounds import FailedRounds
from .loop import Loop
from .messages import Recent
from .options import checked_enough, checked_interval, checked_options, checked_robust
from .robust import NormBound, Robust
from .server_form import ServerForm
from .strategy_methods import StrategyMethods, overridden
from .wire import BUFFERS


class Federated(StrategyMethods):
    """Any algorithm of mimicfl as a Flower strategy.

    algorithm      a name (`mimic`, `fedprox:mu=0.1`) or an object
    lr             the clients' learning rate, a schedule; sent to clients as "lr" in the train config. None: the "lr" of the train
                   config, taken as constant
    global_lr      the server's learning rate eta_t; "local" uses the clients' rate, so that FedAvg is plain model averaging
    server_optimizer   how the server applies the algorithm's direction: "none", "momentum:0.9", "adam:lr=0.01", "yogi" or "adagrad"
    average        evaluate and return a running mean of the global models over about the last 1/average of the rounds, as in
                   `mimicfl.simulate`; clients receive the global model itself. 0: off
    update         "sum" or "mean" of the local gradients
    weighting      "uniform", or by "samples"
    num_clients    N; required by algorithms that use it (`needs_population`)
    sizes          samples per client, {client: samples}; required by these algorithms under weighting="samples"
    wait_for       the first round starts when this many clients are available
    enough         close a round after this many replies: a count, or a share of the selected clients. None: wait for all
    late           replies after their round has closed: "refuse" them, or "count" them in the round in which they arrive
    max_norm       refuse updates that move the model farther than this: a distance, or a multiple of the median of the clients' last
                   norms such as "30x"; None: no bound
    robust         robust aggregation: "clip:R", "median" or "trimmed:S"; None: the mean
    compress       how `client_app` compresses its updates, with error feedback: "8bit", or "topk:0.01"; None: not at all
    min_counted    a round with fewer valid updates is not aggregated
    failed_rounds  the run fails after this many rounds in a row without `min_counted` updates; None: no limit
    folder         folder for checkpoints and rows; a new start with the same folder resumes the run
    save_every   rounds between two checkpoints, or seconds such as "30s"; a restart repeats the rounds after the last one
    keep_checkpoints   number of checkpoints to keep, for `mimicfl flower rollback`
    callbacks      functions and `Callback` objects, as in `mimicfl.simulate`: trackers, early stopping, your own
    availability   an availability pattern that selects the clients of each round, for studies in Flower's simulation
    class_counts   samples per client and class [N, classes]; required by label-correlated patterns
    client_ids     "hello": query each node for its client id; "node": use the node id, which authentication keys make stable
    buffers        name patterns of arrays that are averaged without correction
    form           where the state is kept: `ServerForm` (default), `ClientForm` or `SecureForm`
    seed           seed of client selection, availability and the clients' batches
    patience       seconds to wait for clients before giving up; None: wait without limit
    poll           seconds between polls for replies; None: 0.2 on a network, 0.02 in Flower's simulation
    Further options are those of Flower's FedAvg, by name or by position.
    """

    def __init__(
        self,
        algorithm: Any = "mimic",
        *values: Any,
        lr: Any = None,
        global_lr: Any = "local",
        server_optimizer: Any = "none",
        average: float = 0.0,
        update: str = "sum",
        weighting: str = "uniform",
        num_clients: int | None = None,
        sizes: Mapping[str, float] | None = None,
        wait_for: int | None = None,
        enough: int | float | None = None,
        late: str = "refuse",
        max_norm: float | str | None = "30x",
        robust: str | None = None,
        compress: str | None = None,
        min_counted: int = 1,
        failed_rounds: int | None = 3,
        folder: str | Path | None = None,
        save_every: int | str = 1,
        keep_checkpoints: int = 5,
        callbacks: Sequence[Any] = (),
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
        super().__init__(**checked_options(values, flower))
        self.algorithm = algorithms.make(algorithm)
        if algorithms.trait(self.algorithm, "needs_participation_rates"):
            raise UsageError(
                f"{type(self.algorithm).__name__} needs the clients' true participation rates, which no deployment knows; "
                "use FedAU, which estimates them, or run it in the simulator"
            )
        self.local_lr = None if lr is None else schedule(lr)
        self.global_lr = None if isinstance(global_lr, str) and global_lr == "local" else schedule(global_lr)
        self.server_optimizer = server_optimizers.make(server_optimizer)
        self.average = check("average", average)
        check("update", update)
        check("weighting", weighting)
        self.needs_steps = update == "mean" or algorithms.trait(self.algorithm, "needs_steps")
        self.num_clients = num_clients if num_clients is None else integer("num_clients", num_clients)
        self.wait_for = integer("wait_for", wait_for or max(1, self.min_available_nodes))
        self.enough = checked_enough(enough)
        self.late = one_of("late", late, ["refuse", "count"])
        self.bound = NormBound.parse(max_norm)
        self.failures = FailedRounds(
            integer("min_counted", min_counted), None if failed_rounds is None else integer("failed_rounds", failed_rounds)
        )
        self.folder, self.buffers, self.seed = folder, tuple(buffers), check("seed", seed)
        self.query_ids = one_of("client_ids", client_ids, ["hello", "node"]) == "hello"
        self.patience = patience if patience is None else number("patience", patience, low=0)
        self.poll = poll if poll is None else number("poll", poll, low=0, open_low=True)
        self.pattern = None if availability is None else patterns.make(availability)
        self.class_counts = None if class_counts is None else np.asarray(class_counts)
        if self.pattern is not None and self.num_clients is None:
            raise UsageError("availability needs num_clients=N; pass the number of clients that the pattern covers")
        self.form = form or ServerForm(self.algorithm, update=update, weighting=weighting, num_clients=self.num_clients, sizes=sizes)
        if self.form.name != ServerForm.name and not algorithms.trait(self.algorithm, "has_client_form"):
            raise UsageError(f"form {self.form.name!r} needs an algorithm whose state clients can keep, such as mimic; use form 'server'")
        if self.form.update != update:
            raise UsageError(f"update is {self.form.update!r} in the form but {update!r} in the strategy; pass the same value to both")
        self.form.robust = checked_robust(Robust.parse(robust), self.algorithm, self.form)
        self.compression = Compression.parse(compress)
        if self.compression is not None and (self.form.name != ServerForm.name or not algorithms.trait(self.algorithm, "sends_g")):
            raise UsageError(f"compress needs form 'server', and an algorithm whose clients send g; got form {self.form.name!r}")
        self.save_every = checked_interval(save_every, self.form)
        self.keep_checkpoints = integer("keep_checkpoints", keep_checkpoints)
        self.config = {
            "source": "flower",
            "algorithm": describe(algorithms.ALGORITHMS, self.algorithm),
            "form": self.form.name,
            "lr": "constant" if self.local_lr is None else describe(RATES, self.local_lr),
            "global_lr": "local" if self.global_lr is None else describe(RATES, self.global_lr),
            **({} if self.server_optimizer is None else {"server_optimizer": describe(SERVER_OPTIMIZERS, self.server_optimizer)}),
            **({"average": self.average} if self.average else {}),
            "update": update,
            "weighting": weighting,
            "seed": self.seed,
        } | ({} if num_clients is None else {"num_clients": num_clients})
        self.config |= {} if self.form.robust is None else {"robust": robust}
        self.config |= {} if self.compression is None else {"compress": self.compression.spec}
        self.config["availability"] = "" if self.pattern is None else describe(patterns.PATTERNS, self.pattern)
        self.callbacks = callback_set(None, callbacks)
        self.model: Callable[[], nn.Module] | None = None  # makes the module, for callbacks; `server_app` sets it
        self.rows: list[dict[str, Any]] = []  # one row per round, as in the folder's rows.jsonl
        self._loop = self._matrix = self._model = None
        self._outgoing, self._arrived, self._released = [], {}, Recent()

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
        """Run `num_rounds` rounds of at most `timeout` seconds each. Arguments and result are those of Flower's strategies."""
        if self.form.own_exchange and (changed := overridden(self, "configure_train", "aggregate_train")):
            raise UsageError(f"{changed} is overridden, but secure rounds have messages of their own and do not call it; use form 'server'")
        rounds = integer("num_rounds", num_rounds)
        loop = self._loop = Loop(self, grid)
        loop.train_config = ConfigRecord() if train_config is None else train_config
        loop.evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        loop.evaluate_fn = evaluate_fn
        return loop.run(initial_arrays, rounds, timeout)


@functools.cache
def strategy_for(algorithm: type) -> type[Federated]:
    """Create a strategy class for an algorithm. Values by position are those of Flower's FedAvg; the algorithm's options have names."""
    own = [field.name for field in dataclasses.fields(algorithm) if field.init] if dataclasses.is_dataclass(algorithm) else []

    def __init__(self: Federated, *values: Any, **options: Any) -> None:
        chosen = {name: options.pop(name) for name in own if name in options}
        Federated.__init__(self, algorithm(**chosen), *values, **options)

    doc = f"{algorithm.__name__} as a Flower strategy.\n\n{algorithm.__doc__ or ''}"
    return type(algorithm.__name__, (Federated,), {"__init__": __init__, "__doc__": doc, "__module__": __name__})
