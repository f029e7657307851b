"""`server_app`: a ServerApp from a model, whose settings are those of the strategy, in Python or in Flower's run config."""

from collections.abc import Callable
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import nn

from .. import algorithms
from ..data.clients import Holdout
from ..errors import UsageError, nearest, one_of
from ..local.losses import as_loss
from ..metrics.evaluate import evaluate
from ..params import flatten
from .client import as_data, fill, model_arrays
from .ledger import ClientForm
from .secure import SecureForm
from .strategy import Federated
from .wire import metrics

ROUNDS, TIMEOUT = 10, 600.0
# What a run config may say, with - for _ (`flwr run . -c "num-rounds=20 lr='geometric:0.1,0.99'"`); "" stands for: not given.
SETTINGS = (
    *("num_rounds", "timeout", "algorithm", "lr", "global_lr", "update", "weighting", "num_clients", "wait_for", "enough", "late"),
    *("max_norm", "folder", "availability", "class_counts", "client_ids", "form", "threshold", "clip", "seed", "patience", "poll"),
    *("fraction_train", "fraction_evaluate", "min_train_nodes", "min_evaluate_nodes", "min_available_nodes"),
)


def server_app(model: Callable[[], nn.Module], test: Callable[[], Any] | None = None, *, loss: Any = None, **settings: Any) -> ServerApp:
    """A ServerApp that trains `model()`.

    test       gives samples to evaluate on after every round, as the clients' data function does; None: no central evaluation
    settings   of `Federated`, and num_rounds, timeout, form="server" | "client" | "secure"; the run config wins over them
    """
    check_names(settings, "server_app")
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator, unused-ignore]
    def main(grid: Grid, context: Context) -> None:
        given = {key.replace("-", "_"): value for key, value in context.run_config.items() if value != ""}
        options = settings | {key: value for key, value in given.items() if key in SETTINGS}
        rounds, timeout = int(options.pop("num_rounds", ROUNDS)), float(options.pop("timeout", TIMEOUT))
        arrays, beside = model_arrays(model())
        strategy = make_strategy(beside, options)
        strategy.start(grid, arrays, rounds, timeout, evaluate_fn=None if test is None else scorer(model, test, loss))

    return app


def check_names(settings: dict[str, Any], where: str) -> None:
    for name in settings:
        if name not in SETTINGS:
            raise UsageError(f"{where} has no setting {name!r}; {nearest(name, SETTINGS)}")


def make_strategy(beside: list[str], options: dict[str, Any]) -> Federated:
    """The strategy that these settings stand for; `beside` names the arrays that are not trained."""
    options = {"fraction_evaluate": 0.0} | options
    form = one_of("form", options.pop("form", "server"), ["server", "client", "secure"])
    secure = {key: options.pop(key) for key in ("threshold", "clip") if key in options}
    algorithm = algorithms.make(options.pop("algorithm", "mimic"))
    if form == "server":
        return Federated(algorithm, buffers=beside, **options)
    common = {key: options[key] for key in ("update", "num_clients") if key in options}
    if form == "client":
        held: ClientForm = ClientForm(**common, weighting=options.get("weighting", "uniform"))
    elif options.get("weighting", "uniform") != "uniform":
        raise UsageError("secure aggregation weighs all clients equally: leave weighting at uniform")
    else:
        held = SecureForm(**common, **secure)
    return Federated(algorithm, buffers=beside, form=held, **options)


def scorer(model: Callable[[], nn.Module], test: Callable[[], Any], loss: Any) -> Callable[[int, ArrayRecord], MetricRecord]:
    """Loss and accuracy of the global model on held-out samples."""
    samples = as_data(test())
    measure = as_loss(loss or samples.loss)

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        module = fill(model(), arrays)
        found = evaluate(module, Holdout(samples, torch.device("cpu"), flatten(module).dtype), measure, samples.num_classes)
        return metrics({"loss": found.loss} | ({} if found.accuracy is None else {"accuracy": found.accuracy}))

    return evaluate_fn
