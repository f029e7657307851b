"""Checks the options of a strategy: those of Flower's FedAvg, by name or by position, and how they can be combined."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from .. import algorithms
from ..algorithms.client_memory import ClientMemory
from ..errors import UsageError, integer, number, shown
from .robust import Robust
from .server_form import ServerForm

FLOWER_OPTIONS = tuple(inspect.signature(FlowerFedAvg).parameters)


def checked_options(values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The options of Flower's FedAvg, given by position or by name, checked as far as Flower does not."""
    if len(values) > len(FLOWER_OPTIONS):
        raise UsageError(f"a strategy takes at most {len(FLOWER_OPTIONS)} values by position, those of Flower's FedAvg; got {len(values)}")
    given = dict(zip(FLOWER_OPTIONS, values, strict=False))
    for name in named:
        if name not in FLOWER_OPTIONS:
            raise TypeError(f"unknown option {name!r}")
        if name in given:
            raise TypeError(f"{name} is given by position and by name")
    given |= named
    for name in ("fraction_train", "fraction_evaluate"):
        if name in given:
            given[name] = number(name, given[name], low=0, high=1)
    for name in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
        if name in given:
            given[name] = integer(name, given[name], low=0)
    for name in ("weighted_by_key", "arrayrecord_key", "configrecord_key"):
        if name in given and (not isinstance(given[name], str) or not given[name]):
            raise UsageError(f"{name} must be a name, got {shown(given[name])}")
    return given


def checked_robust(robust: Robust | None, algorithm: Any, form: Any) -> Robust | None:
    """Raise `UsageError` if robust aggregation cannot be combined with this algorithm or form."""
    if robust is None:
        return None
    if form.name != ServerForm.name:
        raise UsageError(
            f"robust aggregation needs the single updates, which form {form.name!r} does not give to the algorithm; use 'server'"
        )
    state = algorithm.init(torch.zeros(1), 1)
    remembers = any(isinstance(value, ClientMemory) for value in vars(state).values()) or algorithms.declared(algorithm, "needs_population")
    if robust.replaces_mean and remembers:
        raise UsageError(
            f"robust={robust.kind!r} replaces the mean over the active clients, which the memory of {type(algorithm).__name__} relies on; "
            "use 'clip:R', or FedAvg, FedAvgM or FedProx"
        )
    return robust


def checked_enough(given: Any) -> int | float | None:
    """Check `enough`: a count of replies, or a share of the selected clients."""
    if given is None or isinstance(given, int):
        return None if given is None else integer("enough", given)
    return number("enough, as a share,", given, low=0, high=1, open_low=True)


def checked_interval(given: Any, form: Any) -> tuple[int, float]:
    """How often to write a checkpoint: every 5 rounds, or every "30s". Returns the fewest rounds and seconds between two checkpoints."""
    seconds = re.fullmatch(r"([0-9.]+) ?s", given) if isinstance(given, str) else None
    if isinstance(given, str) and seconds is None:
        raise UsageError(f"save_every must be a number of rounds, or seconds such as '30s', got {shown(given)}")
    rounds, pause = (1, number("save_every", float(seconds[1]), low=0)) if seconds else (integer("save_every", given), 0.0)
    if form.name != ServerForm.name and (rounds > 1 or pause):
        raise UsageError(f"with form {form.name!r} clients commit to every round, so every round needs a checkpoint; use save_every=1")
    return rounds, pause
