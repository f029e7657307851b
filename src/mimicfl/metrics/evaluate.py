"""Evaluation of a model: loss and accuracy over held-out samples, by class, and by client.

Outputs for classification are [samples, classes, ...], as torch's cross-entropy expects them, and targets are [samples, ...]. Accuracy is
the fraction of correct targets: with labels [samples, positions] every position counts, unless its label is negative or equals the
loss's `ignore_index`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..clients.losses import Loss, built_in_name
from ..data.clients import Holdout
from ..data.convert import IGNORED
from ..data.samples import Samples, clone, forward
from ..tasks import Classification, LearningTask, Metric
from ..tasks.metrics import ByClass


@dataclass(frozen=True)
class Score:
    loss: float
    accuracy: float | None  # None for regression, and if no target counts
    class_accuracy: list[float | None]  # None for a class without test samples
    correct: Tensor | None  # bool of the targets' shape
    counted: Tensor | None = None  # bool of the targets' shape: False where ignored
    metrics: dict[str, float | None] = field(default_factory=dict)  # of a task, by column
    per_sample: Tensor | None = None  # [n, k] the numbers of each sample whose sums give the task's metric per client


def correct(outputs: Tensor, target: Samples) -> Tensor | None:
    """Which targets each of r models predicts correctly from outputs [r, n, ...], bool [r, ...]. None if the targets are not classes."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    single = outputs.ndim < 3 or outputs.shape[2] == 1
    predicted = (outputs.flatten(1) > 0).long() if single else outputs.argmax(dim=2)
    return predicted.view(-1, *target.shape) == target


def ignored_by(loss: Loss) -> int:
    """The label that a loss ignores: its attribute `ignore_index`, as in nn.CrossEntropyLoss, or that argument of a functools.partial."""
    found = getattr(loss, "ignore_index", None)
    given = getattr(loss, "keywords", None)  # of functools.partial
    if found is None and isinstance(given, dict):
        found = given.get("ignore_index")
    return int(found) if isinstance(found, Integral) else IGNORED


def counted_targets(target: Tensor, loss: Loss) -> Tensor:
    """Which targets count for the accuracy."""
    return (target >= 0) & (target != ignored_by(loss))


@torch.no_grad()
def evaluate(module: nn.Module, samples: Holdout, loss: Loss, num_classes: int) -> Score:
    """Evaluate a module on the samples, in evaluation mode. With a task, no more than one slice of outputs is kept at a time."""
    training = module.training
    module.eval()
    try:
        if isinstance(loss, LearningTask):
            tally = Tally(loss)
            for x, y in samples:
                tally.add(forward(module, x), y)
            return tally.score()
        outputs = torch.cat([forward(module, x) for x, _ in samples])
    finally:
        module.train(training)
    return score(outputs, samples.y, loss, num_classes)


class Tally:
    """The loss and metrics of one model for a task, added up batch by batch."""

    def __init__(self, task: LearningTask) -> None:
        self.task, self.client_metric = task, task.client_metric
        self.by_class = type(task) is Classification  # a language model has too many classes for a row
        self.metrics: list[Metric] = [*task.metrics, *([ByClass()] if self.by_class else [])]
        self.loss: list[Tensor] = []  # [2] per batch
        self.sums: list[Any] = []  # per metric: what its `sums` gives, added up
        self.per_sample: list[Tensor] = []

    @torch.no_grad()
    def add(self, output: Tensor, target: Samples) -> None:
        """Add a batch. Custom functions get copies, since they may modify their arguments."""
        total, weight = self.task.sums(output.clone(), clone(target))
        self.loss.append(torch.stack([total.double().sum(), weight.double().sum()]))
        found = [metric.sums(self.task, output.clone(), clone(target)) for metric in self.metrics]
        self.sums = [a + b for a, b in zip(self.sums, found, strict=True)] if self.sums else found
        if self.client_metric is not None:
            self.per_sample.append(self.client_metric.per_sample(self.task, output.clone(), clone(target)).cpu())

    def score(self) -> Score:
        total, weight = torch.stack(self.loss).sum(dim=0).tolist()
        sums = [each.cpu() for each in self.sums]
        values = {metric.column: metric.value(each) for metric, each in zip(self.task.metrics, sums, strict=False)}
        right, _, present = sums[-1].tolist() if self.by_class else ([], [], [])
        recall = [r / n if n else None for r, n in zip(right, present, strict=True)]
        kept = torch.cat(self.per_sample) if self.per_sample else None
        return Score(total / weight if weight else 0.0, values.pop("test_accuracy", None), recall, None, metrics=values, per_sample=kept)


def score(outputs: Tensor, targets: Samples, loss: Loss, num_classes: int) -> Score:
    """Loss and accuracy of the outputs of one model."""
    return scores(outputs[None], targets, loss, num_classes)[0]


def scores(outputs: Tensor, targets: Samples, loss: Loss, num_classes: int) -> list[Score]:
    """Loss and accuracy of the outputs [r, n, ...] of several models. Synchronizes with a GPU once instead of once per number."""
    if built_in_name(loss):
        losses = [loss(output, targets) for output in outputs]
    else:  # a custom loss may modify its arguments
        losses = [loss(output.clone(), clone(targets)) for output in outputs]
    values = torch.stack(losses).tolist()
    hits = correct(outputs, targets)
    if hits is None or not isinstance(targets, Tensor):
        return [Score(value, None, [], None) for value in values]
    keep = counted_targets(targets, loss)
    labels = targets.clamp_min(0).reshape(-1)  # ignored targets are masked out, so their label does not matter
    models = torch.arange(len(outputs) + 1, device=labels.device)[:, None]
    masks = torch.cat([keep[None], hits & keep]).flatten(1)
    places = (models * num_classes + labels).reshape(-1)
    none = torch.zeros(len(models) * num_classes, dtype=torch.long, device=labels.device)
    sizes, *right = none.scatter_add(0, places, masks.reshape(-1).long()).view(-1, num_classes).tolist()
    total = sum(sizes)
    return [
        Score(value, sum(own) / total if total else None, [r / n if n else None for r, n in zip(own, sizes, strict=True)], hit, keep)
        for value, own, hit in zip(values, right, hits, strict=True)
    ]


def client_accuracy(found: Score, split: list[np.ndarray]) -> list[float | None]:
    """The model's accuracy on the samples of every client, active or not; None for a client without targets that count."""
    if found.correct is None or found.counted is None:
        return []
    right, held = (each.reshape(len(each), -1).sum(dim=1).cpu().numpy() for each in (found.correct & found.counted, found.counted))
    return [float(right[part].sum() / n) if (n := held[part].sum()) else None for part in split]


def per_client(metric: Metric, found: Score, split: Sequence[np.ndarray]) -> list[float | None]:
    """The metric on the samples of every client; None for a client without samples that count."""
    if found.per_sample is None:
        return []
    return [metric.value(found.per_sample[torch.from_numpy(part)].sum(dim=0)) if len(part) else None for part in split]
