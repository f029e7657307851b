"""How good a model is: loss and accuracy over held-out samples, by class, and by client."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..data.clients import Holdout
from ..local.losses import Loss


@dataclass(frozen=True)
class Score:
    loss: float
    accuracy: float | None  # None for regression
    class_accuracy: list[float | None]  # None for a class without test samples
    correct: Tensor | None  # [n] bool, one per sample


def correct(output: Tensor, target: Tensor) -> Tensor | None:
    """Which samples are classified rightly, [n]; None where the targets are not classes."""
    if target.is_floating_point():
        return None
    single = output.ndim < 2 or output.shape[1] == 1
    predicted = (output.view(-1) > 0).long() if single else output.argmax(dim=1)
    hits = predicted == target.view_as(predicted)
    return hits if hits.ndim == 1 else hits.flatten(1).all(dim=1)


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
    """What the outputs [r, n, ...] of several models are worth; a GPU is waited for once, not once a number."""
    values = torch.stack([loss(output, targets) for output in outputs]).tolist()
    hits = [correct(output, targets) for output in outputs]
    if hits[0] is None:
        return [Score(value, None, [], None) for value in values]
    labels = targets.reshape(len(targets), -1)[:, 0]
    member = torch.nn.functional.one_hot(labels, num_classes).to(outputs.dtype)  # [n, C]; a product with it counts by class, exactly
    counted = torch.stack([member.sum(dim=0), *[hit.to(member.dtype) @ member for hit in hits if hit is not None]]).tolist()
    sizes, right = counted[0], counted[1:]
    return [
        Score(value, sum(own) / len(targets), [r / n if n else None for r, n in zip(own, sizes, strict=True)], hit)
        for value, own, hit in zip(values, right, hits, strict=True)
    ]


def client_accuracy(train: Score, split: list[np.ndarray]) -> list[float]:
    """The model's accuracy on every client's own samples, participants or not."""
    if train.correct is None:
        return []
    hits = train.correct.cpu().numpy()
    return [float(hits[part].mean()) for part in split]
