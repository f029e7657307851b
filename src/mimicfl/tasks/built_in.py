"""The tasks by name: classification, token prediction, regression and multi-label classification; and custom ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.convert import IGNORED, check_counted, classes_without, same_shape
from ..data.dataset import Data
from ..data.samples import Samples
from ..errors import UsageError, one_of, shown
from .base import LearningTask, of_type
from .predictions import Predictions

LAYOUTS = ("auto", "last", "second")


class Classification(LearningTask):
    """One class per sample, or per position: outputs [B, C] or [B, C, ...] for targets [B] or [B, ...], and cross-entropy.

    A single output is the score of the second of two classes. Targets that are negative or equal to `ignore_index` do not count.
    """

    name = "classification"
    usual: tuple[str, ...] = ("accuracy",)
    classes = "second"  # the dimension of the outputs that holds the classes

    def __init__(self, metrics: Any = None, ignore_index: int = IGNORED) -> None:
        super().__init__(metrics)
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise UsageError(f"ignore_index must be a label, got {shown(ignore_index)}")
        self.ignore_index = ignore_index

    def sums(self, output: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        p = self.predictions(output, target)
        labels = torch.where(p.counted, p.labels, 0)
        lost = F.cross_entropy(p.scores.flatten(0, 1), labels.reshape(-1), reduction="none").view_as(labels)
        return torch.where(p.counted, lost, 0.0).sum(dim=1), p.counted.sum(dim=1).to(lost.dtype)

    def predictions(self, output: Tensor, target: Any) -> Predictions:
        labels = target.reshape(len(target), -1)
        counted = (labels >= 0) & (labels != self.ignore_index)
        return Predictions(self._scores(output, target).reshape(*labels.shape, -1), labels, counted)

    def _scores(self, output: Tensor, target: Tensor) -> Tensor:
        """The outputs with the classes in the last dimension."""
        if output.numel() == target.numel():  # one output for two classes
            one = output.reshape(target.shape)
            return torch.stack([torch.zeros_like(one), one], dim=-1)
        return output if _classes_last(self.classes, output, target) else output.movedim(1, -1)

    def check(self, output: Tensor, target: Samples, data: Data) -> None:
        y = of_type("classes", target, data, False, self.name)
        shapes = f"outputs of shape {tuple(output.shape)}, targets of shape {tuple(y.shape)}"
        single = same_shape(output, y)
        last, second = (output.ndim == y.ndim + 1 and shape == y.shape[1:] for shape in (output.shape[1:-1], output.shape[2:]))
        fits = {"auto": last or second, "last": last, "second": second}[self.classes]
        if not (single or fits):
            if last:
                turned = "transpose(1, 2)" if output.ndim == 3 else "movedim(-1, 1)"
                raise UsageError(f"the classes must be the output's second dimension, not its last ({shapes}); return output.{turned}")
            raise UsageError(f"task {self.name!r} needs one output per class for every target ({shapes})")
        if self.classes == "auto" and last and second and y.ndim > 1 and not single:
            raise UsageError(f"the outputs are ambiguous ({shapes}): pass mf.tasks.TokenPrediction(classes='last') or 'second'")
        outputs = 2 if single else self._scores(output, y).shape[-1]
        check_counted(data.y_test, self.ignore_index)
        if (classes := classes_without(self.ignore_index, data.y_train, data.y_test)) > outputs:
            raise UsageError(
                f"the model has {outputs} outputs per target, but the largest label is {classes - 1}: give its last layer {classes} outputs"
            )


class TokenPrediction(Classification):
    """A class per position, as in language models: outputs [B, L, V] or [B, V, L] for targets [B, L].

    Positions with the label -100, or `ignore_index`, do not count. The loss of a batch is the mean over its counted positions. `classes`
    says which dimension of the outputs holds the V classes: "last", "second", or "auto" to infer it from the shapes.
    """

    name = "token-prediction"
    usual = ("accuracy", "perplexity")

    def __init__(self, metrics: Any = None, ignore_index: int = IGNORED, classes: str = "auto") -> None:
        super().__init__(metrics, ignore_index)
        self.classes = one_of("classes", classes, LAYOUTS)

    def check(self, output: Tensor, target: Samples, data: Data) -> None:
        y = of_type("classes", target, data, False, self.name)
        if y.ndim != 2:
            raise UsageError(f"task 'token-prediction' needs labels [samples, positions], got {tuple(data.y_train.shape)}")
        super().check(output, target, data)


class Regression(LearningTask):
    """Real targets of the outputs' size, and half the mean squared error."""

    name = "regression"
    usual = ("rmse",)

    def sums(self, output: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        off = (output - target.view_as(output)).reshape(len(output), -1)
        return 0.5 * off.square().mean(dim=1), torch.ones_like(off[:, 0])

    def check(self, output: Tensor, target: Samples, data: Data) -> None:
        y = of_type("real targets", target, data, True, self.name)
        if not same_shape(output, y):
            raise UsageError(f"task 'regression' needs one output per target: got {tuple(output.shape)} for {tuple(y.shape)}")


class MultiLabel(LearningTask):
    """Several labels per sample, each 0 or 1: outputs and targets [B, labels], and binary cross-entropy."""

    name = "multi-label"
    usual = ("macro-f1", "auroc", "accuracy")

    def sums(self, output: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        lost = F.binary_cross_entropy_with_logits(output, target.to(output.dtype), reduction="none")
        return lost.mean(dim=1), torch.ones_like(lost[:, 0])

    def predictions(self, output: Tensor, target: Any) -> Predictions:
        scores = torch.stack([torch.zeros_like(output), output], dim=2)
        return Predictions(scores, target.long(), torch.ones_like(target, dtype=torch.bool), per_label=True)

    def check(self, output: Tensor, target: Samples, data: Data) -> None:
        if not isinstance(target, Tensor) or target.ndim != 2 or output.shape != target.shape:
            got = tuple(target.shape) if isinstance(target, Tensor) else f"a {type(target).__name__}"
            raise UsageError(f"task 'multi-label' needs outputs and targets [samples, labels], got {tuple(output.shape)} and {got}")
        for name in ("y_train", "y_test"):
            values = getattr(data, name)
            if not bool(((values == 0) | (values == 1)).all()):
                raise UsageError(f"task 'multi-label' needs targets that are 0 or 1, but {name} holds other values")


class Custom(LearningTask):
    """Your own loss and metrics.

    `loss(output, target)` returns the loss of each sample, [B], or a pair of its loss and its weight, [B] and [B]. `metrics` are `Metric`
    objects; `read_as` is a task, such as "classification", that interprets the outputs for metrics by name.
    """

    def __init__(self, loss: Callable[[Tensor, Any], Any], metrics: Any = (), read_as: Any = None) -> None:
        super().__init__(metrics)
        if not callable(loss) or isinstance(loss, type):
            raise UsageError(f"loss must be a function of (output, target) that returns the loss of each sample, got {shown(loss)}")
        self.loss, self.read_as = loss, None if read_as is None else make_task(read_as)

    def sums(self, output: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        found = self.loss(output, target)
        total, weight = found if isinstance(found, tuple) else (found, None)
        if not isinstance(total, Tensor) or total.shape != (len(output),):
            got = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
            raise UsageError(f"the loss of a task must return the loss of each sample, [{len(output)}] here, got {got}")
        if weight is not None and (not isinstance(weight, Tensor) or weight.shape != total.shape):
            got = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
            raise UsageError(f"the loss of a task must return the weight of each sample, [{len(output)}] here, got {got}")
        return total, torch.ones_like(total) if weight is None else weight

    def predictions(self, output: Tensor, target: Any) -> Predictions | None:
        return None if self.read_as is None else self.read_as.predictions(output, target)

    def check(self, output: Tensor, target: Samples, data: Data) -> None:
        if self.read_as is not None:
            self.read_as.check(output, target, data)
        super().check(output, target, data)


BY_NAME: dict[str, type[LearningTask]] = {kind.name: kind for kind in (Classification, TokenPrediction, Regression, MultiLabel)}


def make_task(task: Any, metrics: Any = None) -> LearningTask:
    """A task by name or as an object; `metrics` replaces its metrics."""
    if isinstance(task, str):
        return BY_NAME[one_of("task", task, BY_NAME)](metrics)
    if not isinstance(task, LearningTask):
        raise UsageError(f"task must be a name ({', '.join(BY_NAME)}) or an object of mf.tasks, got {shown(task)}")
    return task if metrics is None else with_metrics(task, metrics)


def with_metrics(task: LearningTask, metrics: Any) -> LearningTask:
    """The same task with other metrics."""
    other = type(task).__new__(type(task))
    other.__dict__ = {**vars(task)}
    LearningTask.__init__(other, metrics)
    return other


def _classes_last(classes: str, output: Tensor, target: Tensor) -> bool:
    return classes == "last" or (classes == "auto" and output.shape[1:-1] == target.shape[1:])
