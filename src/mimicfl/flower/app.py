"""`server_app`: a ServerApp from a model; the strategy's options come from Python or from Flower's run config."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import nn

from ..callbacks import tracker
from ..clients.losses import criterion_of
from ..clients.params import Workspace
from ..data.clients import Holdout
from ..errors import UsageError, nearest, one_of
from ..metrics.evaluate import evaluate
from .client import CPU, as_data, model_arrays, score_metrics
from .client_form import ClientForm
from .models import frozen_digest, load_arrays
from .secure_form import SecureForm
from .server_form import ServerForm
from .strategy import Federated
from .wire import metric_record

ROUNDS, TIMEOUT = 10, 600.0
MISSPELT = 0.85  # how much a key resembles the setting that it was meant to be
FORMS: dict[str, type[ServerForm]] = {form.name: form for form in (ServerForm, ClientForm, SecureForm)}
OF_SECURE_FORM = ("threshold", "clip")


def _options() -> list[str]:
    """All options of a strategy, except those that a run config cannot express."""
    ours = [name for name in inspect.signature(Federated).parameters if name not in ("buffers", "sizes", "flower")]
    flowers = [name for name, p in inspect.signature(FlowerFedAvg).parameters.items() if isinstance(p.default, (int, float))]
    return ["num_rounds", "timeout", "track", *ours, *OF_SECURE_FORM, *flowers]


# The keys of the run config, with - for _: `flwr run . -c "num-rounds=20 lr='geometric:0.1,0.99'"`. "" means: use the default.
RUN_CONFIG = tuple(_options())


def server_app(
    model: Callable[[], nn.Module],
    test: Callable[[], Any] | None = None,
    *,
    loss: Any = None,
    task: Any = None,
    metrics: Any = None,
    **settings: Any,
) -> ServerApp:
    """A ServerApp that trains `model()`.

    test       returns the samples to evaluate on after every round, in the format of the clients' data function; None: no evaluation
    loss, task, metrics   the learning task, as in `mimicfl.simulate`, for evaluation
    settings   options of `Federated`, num_rounds, timeout, track (trackers, as in "tensorboard:DIR csv:DIR"),
               form="server" | "client" | "secure", and for secure rounds threshold and clip; the run config takes precedence
    """
    if unknown := [name for name in settings if name not in RUN_CONFIG]:
        raise UsageError(f"server_app has no setting {unknown[0]!r}; {nearest(unknown[0], RUN_CONFIG)}")
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator, unused-ignore]
    def main(grid: Grid, context: Context) -> None:
        check_spelling(context.run_config)
        given = {key.replace("-", "_"): value for key, value in context.run_config.items() if value != ""}
        options = settings | {key: value for key, value in given.items() if key in RUN_CONFIG}
        rounds, timeout = int(options.pop("num_rounds", ROUNDS)), float(options.pop("timeout", TIMEOUT))
        arrays, untrained = model_arrays(module := model())
        strategy = make_strategy(untrained, options)
        strategy.model = model
        frozen = frozen_digest(module)
        config = ConfigRecord({"frozen": frozen} if frozen else {})
        strategy.start(
            grid, arrays, rounds, timeout, config, evaluate_fn=None if test is None else evaluator(model, test, loss, task, metrics)
        )

    return app


def check_spelling(run_config: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a misspelt setting.

    Other unknown keys belong to the user's app, and so does one that stands beside the setting that it resembles. `flwr run` and `try_app`
    refuse every key that the app does not declare, but a federation in Python declares nothing.
    """
    given = {key.replace("-", "_"): key for key in run_config}
    for name in given.keys() - set(RUN_CONFIG):
        close = difflib.get_close_matches(name, RUN_CONFIG, n=1, cutoff=MISSPELT)
        if close and close[0] not in given:
            raise UsageError(f"the run config has no setting {given[name]!r}; did you mean {close[0].replace('_', '-')!r}?")


def make_strategy(untrained: list[str], options: dict[str, Any]) -> Federated:
    """The strategy for these settings; `untrained` names the arrays that are averaged without correction."""
    tracked = [tracker.make(spec) for spec in str(options.pop("track", "")).split()]
    if tracked:
        options["callbacks"] = [*options.get("callbacks", ()), *tracked]
    form = FORMS[one_of("form", options.pop("form", ServerForm.name), FORMS)]
    if form is SecureForm and options.get("weighting", "uniform") != "uniform":
        raise UsageError("secure aggregation weights all clients equally; use weighting='uniform'")
    if form is not ServerForm:  # the strategy makes that one, from its algorithm
        options["form"] = form(**{key: options[key] for key in inspect.signature(form).parameters if key in options})
    strategy = Federated(buffers=untrained, **{key: value for key, value in options.items() if key not in OF_SECURE_FORM})
    if "fraction_evaluate" not in options:  # set afterwards: Flower warns of what the user then has not asked for
        strategy.fraction_evaluate, strategy.min_evaluate_nodes = 0.0, 0
    return strategy


def evaluator(
    model: Callable[[], nn.Module], test: Callable[[], Any], loss: Any = None, task: Any = None, metrics: Any = None
) -> Callable[[int, ArrayRecord], MetricRecord]:
    """An `evaluate_fn` that computes the loss and the metrics of the global model on the test samples."""
    samples = as_data(test())
    measure = criterion_of(samples, loss or None, task, metrics)

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        frame = Workspace(load_arrays(model(), arrays), CPU)
        found = evaluate(frame.module, Holdout(samples, CPU, frame.input_dtype), measure, samples.num_classes)
        return metric_record(score_metrics(found))

    return evaluate_fn
