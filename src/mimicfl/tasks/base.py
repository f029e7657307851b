"""The base class of tasks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.dataset import Data
from ..data.samples import Samples
from ..errors import UsageError, shown
from .metrics import Metric, make_metric
from .predictions import Predictions


class LearningTask(ABC):
    """A learning task: the loss, how outputs are interpreted, and the metrics.

    A task is a loss: task(output, target) is the loss of a batch. The loss is a ratio of two sums over samples, `sums`, so that neither
    the batch size of an evaluation nor padding can change it.
    """

    name = "custom"
    usual: tuple[str, ...] = ()  # metrics if none are given; the first is the main one

    def __init__(self, metrics: Any = None) -> None:
        self.metrics: tuple[Metric, ...] = as_metrics(self.usual if metrics is None else metrics)

    @abstractmethod
    def sums(self, output: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        """Return for each sample its loss and its weight, [B] and [B]; the loss of a batch is the sum of one over the sum of the other."""

    def __call__(self, output: Tensor, target: Any) -> Tensor:
        """Return the loss of a batch; 0 if no target counts."""
        return ratio(*self.sums(output, target))

    def predictions(self, output: Tensor, target: Any) -> Predictions | None:
        """Return predicted classes and targets, for metrics by name; None if the targets are not classes."""
        return None

    def check(self, output: Tensor, target: Samples, data: Data) -> None:
        """Raise a `UsageError` if outputs or targets do not fit the task. `target` belongs to `output`, `data` holds all targets."""
        self.sums(output, target)

    @property
    def client_metric(self) -> Metric | None:
        """The metric that is also computed for each client: the first one that can be."""
        return next((metric for metric in self.metrics if metric.per_client), None)

    def check_metrics(self, output: Tensor, target: Samples) -> None:
        """Try the metrics on a batch before training."""
        for metric in self.metrics:
            metric.check(self, output, target)


def ratio(total: Tensor, weight: Tensor) -> Tensor:
    """The sum of one over the sum of the other; 0 if both are 0."""
    return total.sum() / weight.sum().clamp_min(torch.finfo(total.dtype).tiny)


def as_metrics(given: Any) -> tuple[Metric, ...]:
    """Metrics given as names, as `Metric` objects, or as names separated by commas."""
    if isinstance(given, str):
        given = [name.strip() for name in given.split(",") if name.strip()]
    if isinstance(given, Metric):
        given = [given]
    if not isinstance(given, Sequence):
        raise UsageError(f"metrics must be a list of names or Metric objects, got {shown(given)}")
    found = tuple(make_metric(each) for each in given)
    columns = [metric.column for metric in found]
    if twice := [metric.name for metric in found if columns.count(metric.column) > 1]:
        raise UsageError(f"the metric {twice[0]!r} is given twice; give each metric once, under its own name")
    return found


def of_type(what: str, target: Samples, data: Data, real: bool, task: str) -> Tensor:
    """The targets as one tensor of the kind that the task needs."""
    if not isinstance(target, Tensor):
        raise UsageError(f"task {task!r} needs one tensor of targets, but y is a {type(target).__name__}; use mf.tasks.Custom")
    if target.is_floating_point() != real:
        remedy = "convert y to a floating-point type" if real else "give integer labels, or use task 'regression'"
        raise UsageError(f"task {task!r} needs {what}, but y_train is {data.y_train.dtype}; {remedy}")
    return target
