"""The fingerprint of a run: one hash per part, by value, of everything that its result depends on.

The same fingerprint decides which runs may share a program, which folder belongs to which run, which runs are already finished, and
which runs a report may average.
"""

import functools
import inspect
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from ..algorithms import ALGORITHMS
from ..callbacks.interface import Callback
from ..clients.params import flatten
from ..data.datasets import DATASETS
from ..data.partition import PARTITIONS
from ..fingerprint import Fingerprint, digest, source
from ..fingerprint.values import ADDRESS, SIMPLE, Values, weights_of
from ..problem import Problem
from ..registry import Registry, describe, parse
from .parts import RunParts


def fingerprint(run: RunParts, rounds: int) -> Fingerprint:
    """The fingerprint of the run's first `rounds` rounds."""
    problem, server, active = run.problem, run.server, run.active[:rounds]
    chosen, stages, mean = run.participation_settings, run.participation.staged, server.running_mean
    busy = [(t, m) for t, m in enumerate(active.sum(axis=1).tolist()) if m]
    values, (shared, shared_own, unreadable) = Values(), _of_problem(problem)
    common = shared | {
        "algorithm": [describe(ALGORITHMS, server.algorithm), values.of(server.algorithm), _built_in_code(server.algorithm)]
        + ([] if server.optimizer is None else [values.of(server.optimizer), _built_in_code(server.optimizer)]),
        "local training": values.of(problem.local.fingerprint),
        "update": server.update,
        "evaluation": run.eval_every if mean is None else [run.eval_every, mean.average, _built_in_code(mean)],
    }
    own = shared_own | {
        "schedule": values.of(active),
        "rates": [[rate(t, m) for rate in (server.local_lr, server.global_lr)] for t, m in busy],
        "seed": run.seed,
        "callback": _callbacks(run.callbacks.of_result, values),
        "diagnosis": None if run.diagnostics is None else values.of(run.diagnostics.settings),
    }
    staged = stages is not None or chosen.rates != "known"  # fingerprints of other runs stay what they were
    if staged:
        events = run.participation.arrivals
        own["participation"] = values.of(
            [stages, chosen.rates, *([] if events is None else [events.versions[:rounds], events.times[:rounds]])]
        )
    made_data = _made_by(DATASETS, run.config, "dataset", values)
    follows = ("seed", "num_clients", "ids") if made_data else ("seed", "num_clients")  # the ids of such data follow the seed as well
    experiment = {
        "data": made_data or own["data"],
        "split": _made_by(PARTITIONS, run.config, "partition", values, follows) or problem.partition or own["split"],
        "availability": values.of(chosen.pattern),
        "rates": [values.of(server.local_lr), values.of(server.global_lr)],
    }
    if problem.test_split is not None:
        own["test split"] = values.of(problem.test_split)
        experiment["test split"] = problem.test_partition or own["test split"]
    if staged:
        kept: tuple[Any, ...] = () if stages is None else (stages.selection, stages.deadline, stages.round_seconds)
        kept += ([chosen.speed, chosen.bandwidth], chosen.rates, *([] if chosen.buffered is None else [chosen.buffered]))
        experiment["participation"] = [values.of(each) for each in kept]
    of_run, of_experiment = ({key: digest(value) for key, value in given.items()} for given in (common | own, common | experiment))
    return Fingerprint(of_run, of_experiment, unreadable=sorted(values.unreadable | unreadable))


def _of_problem(problem: Problem) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """What the problem adds to `common` and to `own`, and the unreadable functions; found once for all runs that share the problem."""
    if "fingerprint" not in problem.cache:
        template, values, shape = problem.template, Values(), Values(by_shape=weights_of(problem.template))
        common = {
            "weighting": values.of(problem.weighting),
            "model": [ADDRESS.sub("", str(template)), shape.of(template), _tied(template)],
            "loss": values.of(problem.loss),
            "precision": [problem.precision, str(problem.workspace.w.dtype)],
        }
        if problem.data.transform is not None:
            common["transform"] = values.of(problem.data.transform)
        own = {
            "data": problem.data.described(),  # a run begins with a check that it is unchanged
            "split": values.of(problem.split),
            "frozen weights": values.of([*[p for p in template.parameters() if not p.requires_grad], *template.buffers()]),
            "initial weights": values.of(flatten(template)),
            "device": problem.device.type,
        }
        problem.cache["fingerprint"] = common, own, values.unreadable | shape.unreadable
    return problem.cache["fingerprint"]  # type: ignore[no-any-return]


def _built_in_code(part: object) -> list[str]:
    """The methods of the built-in classes that a part of the server inherits: another version of them must not continue the run."""
    kinds = [kind for kind in type(part).__mro__ if kind.__module__.startswith("mimicfl.algorithms.")]
    methods = [value for kind in kinds for _, value in sorted(vars(kind).items()) if inspect.isfunction(value)]
    return [source.of_code(f.__code__)[0] for f in methods if f.__code__.co_filename != "<string>"]  # those are made by `dataclass`


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


def _callbacks(given: Sequence[Any], values: Values) -> Any:
    found = [_callback(each, values) for each in given]
    return None if not found else found[0] if len(found) == 1 else found


def _callback(function: Any, values: Values) -> Any:
    """A callback by its code and the plain values it holds; lists and objects that it fills do not count."""
    if isinstance(function, Callback):
        options = {name: value for name, value in sorted(vars(function).items()) if isinstance(value, SIMPLE)}
        return [values.of(type(function)), values.of(options)]
    if isinstance(function, functools.partial):
        given = [*function.args, *function.keywords.values()]
        return [_callback(function.func, values), values.of([each for each in given if isinstance(each, SIMPLE)])]
    inner = getattr(function, "__func__", function)
    if not inspect.isfunction(inner):
        return values.of(type(function))
    held = [value for value in source.held_by(inner) if isinstance(value, SIMPLE)]
    code = {name: value for name, value in source.globals_used(inner).items() if inspect.isroutine(value) or inspect.isclass(value)}
    return [inner.__qualname__, source.of_code(inner.__code__)[0], values.of(held), values.of(code)]
