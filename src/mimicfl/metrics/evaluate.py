"""How good a model is: loss and accuracy over held-out samples, by class, and by client.

Outputs for classes are [samples, classes, ...], as torch's cross-entropy takes them, and targets [samples, ...]. Accuracy is over
targets: with labels [samples, positions] every position counts, unless it has no target (a negative label, or the loss's `ignore_index`).
"""

from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
from torch import Tensor, nn

from ..data.clients import Holdout
from ..data.dataset import IGNORED
from ..local.losses import Loss


@dataclass(frozen=True)
class Score:
    loss: float
    accuracy: float | None  # None for regression, and if no target counts
    class_accuracy: list[float | None]  # None for a class without test samples
    correct: Tensor | None  # bool of the targets' shape
    counted: Tensor | None = None  # bool of the targets' shape: False where ignored


def correct(output: Tensor, target: Tensor) -> Tensor | None:
    """Which targets are predicted correctly, bool of the targets' shape; None if the targets are not classes."""
    if target.is_floating_point():
        return None
    single = output.ndim < 2 or output.shape[1] == 1
    predicted = (output.reshape(-1) > 0).long() if single else output.argmax(dim=1)
    return predicted.view_as(target) == target


def ignored_by(loss: Loss) -> int:
    """The label that a loss ignores: its attribute `ignore_index`, as in nn.CrossEntropyLoss, or that argument of a functools.partial."""
    found = getattr(loss, "ignore_index", None)
    given = getattr(loss, "keywords", None)  # of functools.partial
    if found is None and isinstance(given, dict):
        found = given.get("ignore_index")
    return int(found) if isinstance(found, Integral) else IGNORED


def counted(target: Tensor, loss: Loss) -> Tensor:
    """Which targets count for the accuracy."""
    return (target >= 0) & (target != ignored_by(loss))


@torch.no_grad()
def evaluate(module: nn.Module, samples: Holdout, loss: Loss, num_classes: int) -> Score:
    """One pass in evaluation mode."""
    training = module.training
    module.eval()
    outputs = torch.cat([module(x) for x, _ in samples])
    module.train(training)
    return score(outputs, samples.y, loss, num_classes)


def score(outputs: Tensor, targets: Tensor, loss: Loss, num_classes: int) -> Score:
    """What these outputs are worth."""
    return scores(outputs[None], targets, loss, num_classes)[0]


def scores(outputs: Tensor, targets: Tensor, loss: Loss, num_classes: int) -> list[Score]:
    """What the outputs [r, n, ...] of several models are worth; a GPU is waited for once, not once per number."""
    # Copies, since a loss may write to what it is given.
    values = torch.stack([loss(output.clone(), targets.clone()) for output in outputs]).tolist()
    if targets.is_floating_point():
        return [Score(value, None, [], None) for value in values]
    keep = counted(targets, loss)
    hits = [hit for output in outputs if (hit := correct(output, targets)) is not None]
    labels = targets.clamp_min(0).reshape(-1)  # ignored targets add nothing, whatever their label here

    def by_class(mask: Tensor) -> Tensor:
        return torch.zeros(num_classes, dtype=torch.long, device=labels.device).scatter_add_(0, labels, mask.reshape(-1).long())

    sizes, *right = torch.stack([by_class(keep), *[by_class(hit & keep) for hit in hits]]).tolist()
    total = sum(sizes)
    return [
        Score(value, sum(own) / total if total else None, [r / n if n else None for r, n in zip(own, sizes, strict=True)], hit, keep)
        for value, own, hit in zip(values, right, hits, strict=True)
    ]


def client_accuracy(train: Score, split: list[np.ndarray]) -> list[float]:
    """The model's accuracy on every client's own samples, active or not; 0 for a client without a target that counts."""
    if train.correct is None or train.counted is None:
        return []
    right, held = (each.reshape(len(each), -1).sum(dim=1).cpu().numpy() for each in (train.correct & train.counted, train.counted))
    return [float(right[part].sum() / max(held[part].sum(), 1)) for part in split]
