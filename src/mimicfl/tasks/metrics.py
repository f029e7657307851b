"""Metrics by name and custom ones. Every metric is computed from sums over samples, so batches of any size give the same value."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError, check_callable, first_line, flag, nearest, shown
from .predictions import Predictions, Reader
from .ranking import Scores

TAKEN = ("accuracy", "loss")  # columns that rows have already


class Metric:
    """A metric: sums over samples, and the value that follows from them.

    A custom metric is `Metric(name, function)`, where function(output, target) returns one number per sample, [B]; the value is their mean.
    If it returns several numbers per sample, [B, k], `value` turns their sums [k] into the value:

    >>> import torch
    >>> within = Metric("within-1", lambda output, target: ((output - target).abs() < 1).double().mean(dim=1))
    >>> sums = within.sums(None, torch.tensor([[0.0], [2.0]]), torch.tensor([[0.5], [9.0]]))
    >>> within.value(sums)
    0.5
    """

    per_client = True  # whether the sums of a client's samples give a value for the client
    percent = False  # shown in percent

    def __init__(
        self,
        name: str,
        function: Callable[[Tensor, Any], Tensor],
        value: Callable[[Tensor], float] | None = None,
        higher_is_better: bool = True,
    ) -> None:
        if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
            raise UsageError(f"the name of a metric must be a word such as top5 or mean-error, got {shown(name)}")
        if not callable(function):
            raise UsageError(f"metric {name!r} needs a function of (output, target), got {shown(function)}")
        check_callable(f"value of metric {name!r}", value)
        self.name, self.function, self._value = name, function, value
        self.higher_is_better = flag("higher_is_better", higher_is_better)

    @property
    def column(self) -> str:
        """The name of the metric's column in rows."""
        return "test_" + self.name.replace("-", "_")

    def per_sample(self, task: Reader | None, output: Tensor, target: Any) -> Tensor:
        """The numbers of each sample, [B, k + 1]: those of the function, and a one that counts the sample."""
        found = self.function(output, target)
        if not isinstance(found, Tensor) or not found.ndim or len(found) != len(output) or found.ndim > 2:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise UsageError(f"metric {self.name!r} must return one number per sample, [{len(output)}] here, got {got}")
        found = found.reshape(len(found), -1).double()
        if found.shape[1] != 1 and self._value is None:
            raise UsageError(
                f"metric {self.name!r} returns {found.shape[1]} numbers per sample: return one, [{len(output)}] here, or give value=..., a "
                "function of their sums"
            )
        return torch.cat([found, torch.ones_like(found[:, :1])], dim=1)

    def sums(self, task: Reader | None, output: Tensor, target: Any) -> Tensor:
        """The sums over a batch; those of several batches are added."""
        return self.per_sample(task, output, target).sum(dim=0)

    def value(self, sums: Tensor) -> float | None:
        """The metric's value; None if no sample counts."""
        samples = float(sums[-1])
        if not samples:
            return None
        return _finite(float(sums[0] / samples) if self._value is None else float(self._value(sums[:-1])))

    def check(self, task: Reader, output: Tensor, target: Any) -> None:
        """Raise a `UsageError` if the metric cannot be computed for this task."""
        try:
            self.value(self.sums(task, output, target).cpu())
        except UsageError:
            raise
        except Exception as error:  # a custom function may raise anything
            raise UsageError(f"metric {self.name!r} fails on the first test samples: {first_line(error)}") from error


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class BuiltIn(Metric):
    """A metric by name."""

    higher_is_better = True
    percent = True
    name = ""

    def __init__(self) -> None:
        """Built-in metrics have no options."""

    def read(self, task: Reader | None, output: Tensor, target: Any) -> Predictions:
        found = None if task is None else task.predictions(output, target)
        if found is None:
            named = "a custom task" if task is None else f"task {task.name!r}"
            raise UsageError(f"metric {self.name!r} is for classes, which {named} does not predict; for real targets use rmse")
        return found


class Accuracy(BuiltIn):
    """The fraction of counted targets that are predicted correctly."""

    name = "accuracy"

    def per_sample(self, task: Reader | None, output: Tensor, target: Any) -> Tensor:
        p = self.read(task, output, target)
        right = (p.scores.argmax(dim=2) == p.labels) & p.counted
        return torch.stack([right.sum(dim=1), p.counted.sum(dim=1)], dim=1).double()

    def value(self, sums: Tensor) -> float | None:
        return float(sums[0] / sums[1]) if sums[1] else None


class Perplexity(BuiltIn):
    """exp of the mean cross-entropy per counted target."""

    name = "perplexity"
    higher_is_better = False
    percent = False

    def per_sample(self, task: Reader | None, output: Tensor, target: Any) -> Tensor:
        p = self.read(task, output, target)
        picked = p.scores.log_softmax(dim=2).gather(2, torch.where(p.counted, p.labels, 0)[..., None])[..., 0]
        lost = torch.where(p.counted, -picked, 0.0).double().sum(dim=1)
        return torch.stack([lost, p.counted.sum(dim=1).double()], dim=1)

    def value(self, sums: Tensor) -> float | None:
        return math.exp(min(float(sums[0] / sums[1]), 700.0)) if sums[1] else None


class RMSE(BuiltIn):
    """The root of the mean squared error."""

    name = "rmse"
    higher_is_better = False
    percent = False

    def per_sample(self, task: Reader | None, output: Tensor, target: Any) -> Tensor:
        if not isinstance(target, Tensor) or not target.is_floating_point():
            raise UsageError("metric 'rmse' is for real targets; for classes use accuracy")
        off = (output.double() - target.view_as(output).double()).reshape(len(output), -1).square()
        return torch.stack([off.sum(dim=1), off.new_full((len(off),), off.shape[1])], dim=1)

    def value(self, sums: Tensor) -> float | None:
        return math.sqrt(float(sums[0] / sums[1])) if sums[1] else None


class ByClass(BuiltIn):
    """Counts per class, [3, classes]: predicted correctly, predicted, and present. A label of a multi-label task is two classes."""

    per_client = False  # a client's few test samples rarely hold every class

    def sums(self, task: Reader | None, output: Tensor, target: Any) -> Tensor:
        p = self.read(task, output, target)
        labels, guessed, classes = p.labels.clamp_min(0), p.scores.argmax(dim=2), p.scores.shape[2]
        if p.per_label:
            first = classes * torch.arange(labels.shape[1], device=labels.device)
            labels, guessed, classes = labels + first, guessed + first, classes * labels.shape[1]
        right = p.counted & (labels == guessed)
        return torch.stack([_counts(each, kept, classes) for each, kept in ((labels, right), (guessed, p.counted), (labels, p.counted))])


def _counts(labels: Tensor, kept: Tensor, classes: int) -> Tensor:
    zeros = torch.zeros(classes, dtype=torch.float64, device=labels.device)
    return zeros.index_add_(0, labels[kept], torch.ones_like(labels[kept], dtype=torch.float64))


class BalancedAccuracy(ByClass):
    """The mean over the classes that occur of the fraction that is predicted correctly."""

    name = "balanced-accuracy"

    def value(self, sums: Tensor) -> float | None:
        right, _, present = sums
        return float((right / present)[present > 0].mean()) if bool((present > 0).any()) else None


class MacroF1(ByClass):
    """The mean over classes, or over labels, of F1 = 2 correct / (predicted + present)."""

    name = "macro-f1"

    def sums(self, task: Reader | None, output: Tensor, target: Any) -> Tensor:
        found = super().sums(task, output, target)
        p = self.read(task, output, target)
        return found[:, 1::2] if p.per_label else found  # of a label, only its presence counts

    def value(self, sums: Tensor) -> float | None:
        right, guessed, present = sums
        held = guessed + present > 0
        return float((2 * right / (guessed + present))[held].mean()) if bool(held.any()) else None


class AUROC(BuiltIn):
    """The area under the ROC curve: how often a positive target scores above a negative one; ties count one half.

    With more than two classes, or several labels, the mean over those that have both positive and negative targets. It is exact for up to
    2^23 scores (targets times classes); with more, scores are rounded to 65,536 levels, the upper 16 bits of a float32.
    """

    name = "auroc"
    per_client = False

    def sums(self, task: Reader | None, output: Tensor, target: Any) -> Any:
        return self._scores(self.read(task, output, target))

    @staticmethod
    def _scores(p: Predictions) -> Scores:
        # In float64, where the probabilities of confident predictions differ that are all 1 in float32.
        scores = p.scores.double()
        if p.per_label:
            found, positive = scores[..., 1] - scores[..., 0], p.labels == 1
        elif scores.shape[2] == 2:
            found, positive = (scores[..., 1] - scores[..., 0])[p.counted][:, None], (p.labels[p.counted] == 1)[:, None]
        else:
            found = scores.log_softmax(dim=2)[p.counted]  # [n, C]: each class against all others
            positive = torch.arange(scores.shape[2], device=found.device) == p.labels[p.counted][:, None]
        return Scores(found + 0.0, positive)  # -0.0 + 0.0 is 0.0: both zeros are one score

    def value(self, sums: Any) -> float | None:
        areas = sums.areas()
        return sum(areas) / len(areas) if areas else None


BY_NAME: dict[str, type[BuiltIn]] = {kind.name: kind for kind in (Accuracy, BalancedAccuracy, MacroF1, Perplexity, RMSE, AUROC)}
BY_COLUMN = {kind().column: kind for kind in BY_NAME.values()}
FALLING = ("loss", "error", "distance", "spread")  # in the names of other columns of which smaller values are better


def higher_is_better(column: str, directions: Mapping[str, bool] | None = None) -> bool:
    """Whether larger values of a column of the rows are better: as its metric says, otherwise by its name.

    `directions` are those of the run's own metrics, by column.
    """
    if directions and column in directions:
        return directions[column]
    if column in BY_COLUMN:
        return BY_COLUMN[column].higher_is_better
    return not any(word in column for word in (*FALLING, Perplexity.name, RMSE.name))


def make_metric(given: Any) -> Metric:
    """A metric by name, or a `Metric` object."""
    if isinstance(given, Metric):
        if given.name.replace("_", "-") in (*BY_NAME, *TAKEN) and not isinstance(given, BuiltIn):
            raise UsageError(f"{given.name!r} is a built-in metric; choose another name for your own")
        return given
    if not isinstance(given, str):
        raise UsageError(f"a metric must be a name ({', '.join(BY_NAME)}) or a mf.tasks.Metric, got {shown(given)}")
    if given not in BY_NAME:
        raise UsageError(f"metric {shown(given)} is unknown; {nearest(given, BY_NAME)}")
    return BY_NAME[given]()
