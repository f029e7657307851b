"""The fingerprint of a run: one hash per part, by value, of everything that its result depends on.

The same fingerprint decides which runs may share a program, which folder belongs to which run, which runs are already finished, and
which runs a report may average.
"""

import functools
import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import nn

from ..algorithms import ALGORITHMS
from ..data.datasets import DATASETS
from ..data.partition import PARTITIONS
from ..fingerprint import Fingerprint, digest
from ..params import flatten
from ..registry import Registry, describe, parse
from . import source
from .values import ADDRESS, SIMPLE, Values, weights_of

if TYPE_CHECKING:
    from .run import Run


def fingerprint(run: "Run", rounds: int) -> Fingerprint:
    """The fingerprint of the run's first `rounds` rounds."""
    available = run.available[:rounds]
    busy = [(t, m) for t, m in enumerate(available.sum(axis=1).tolist()) if m]
    values, shape = Values(), Values(by_shape=weights_of(run.template))
    common = {
        "weighting": values.of(run.weighting),
        "model": [ADDRESS.sub("", str(run.template)), shape.of(run.template), _tied(run.template)],
        "loss": values.of(run.loss),
        "algorithm": [describe(ALGORITHMS, run.algorithm), values.of(run.algorithm)],
        "local training": values.of({key: value for key, value in vars(run.local).items() if key != "lr"}),
        "update": run.update,
        "precision": [run.precision, str(run.work.w.dtype)],
        "evaluation": run.eval_every,
    }
    own = {
        "data": run.data.described(),  # a run begins with a check that it is unchanged
        "split": values.of(run.split),
        "frozen weights": values.of([*[p for p in run.template.parameters() if not p.requires_grad], *run.template.buffers()]),
        "initial weights": values.of(flatten(run.template)),
        "schedule": values.of(available),
        "rates": [[rate(t, m) for rate in (run.local_lr, run.global_lr)] for t, m in busy],
        "seed": run.seed,
        "device": run.device.type,
        "callback": None if run.each_round is None else _callback(run.each_round, values),
        "diagnosis": None if run.watch is None else values.of(run.watch.plan),
    }
    made_data = _made_by(DATASETS, run.config, "dataset", values)
    follows = ("seed", "num_clients", "ids") if made_data else ("seed", "num_clients")  # the ids of such data follow the seed as well
    experiment = {
        "data": made_data or own["data"],
        "split": _made_by(PARTITIONS, run.config, "partition", values, follows) or run.partition or own["split"],
        "availability": values.of(run.pattern),
        "rates": [values.of(run.local_lr), values.of(run.global_lr)],
    }
    of_run, of_experiment = ({key: digest(value) for key, value in given.items()} for given in (common | own, common | experiment))
    return Fingerprint(of_run, of_experiment, unreadable=sorted(values.unreadable | shape.unreadable))


def _tied(model: nn.Module) -> list[int]:
    """Which parameters are shared: for each, the index of its first occurrence."""
    first: dict[int, int] = {}
    return [first.setdefault(id(p), k) for k, (_, p) in enumerate(model.named_parameters(remove_duplicate=False))]


def _made_by(
    registry: Registry[Any], config: dict[str, Any], setting: str, values: Values, follows: Collection[str] = ("seed", "num_clients")
) -> Any:
    """The factory of a part that is drawn from the seed; None if the part itself must be compared."""
    factory = registry.factories.get(parse(str(config.get(setting, "")))[0]) if "source" not in config else None
    if factory is None or not set(follows) & set(inspect.signature(factory).parameters):
        return None
    return [config[setting], values.of(factory)]


def _callback(function: Any, values: Values) -> Any:
    """A callback by its code and the plain values it holds; lists and objects that it fills do not count."""
    if isinstance(function, functools.partial):
        given = [*function.args, *function.keywords.values()]
        return [_callback(function.func, values), values.of([each for each in given if isinstance(each, SIMPLE)])]
    inner = getattr(function, "__func__", function)
    if not inspect.isfunction(inner):
        return values.of(type(function))
    held = [value for value in source.held_by(inner) if isinstance(value, SIMPLE)]
    code = {name: value for name, value in source.globals_used(inner).items() if inspect.isroutine(value) or inspect.isclass(value)}
    return [inner.__qualname__, source.of_code(inner.__code__)[0], values.of(held), values.of(code)]
