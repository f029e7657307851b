"""Losses by name. A loss is a function of (output, target) that returns the mean over the batch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..data.dataset import Data
from ..errors import UsageError, shown
from ..registry import Registry
from ..tasks import make_task

Loss = Callable[[Tensor, Any], Tensor]
LOSSES: Registry[Any] = Registry("loss", ("loss",))
register = LOSSES.register


@register("cross-entropy")
def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy for classes 0..C-1; output [B, C]."""
    return F.cross_entropy(output, target)


@register("binary")
def binary(output: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy for two classes and a single output; a positive output means class 1."""
    return F.binary_cross_entropy_with_logits(output.view(-1), target.view(-1).to(output.dtype))


@register("mse")
def mse(output: Tensor, target: Tensor) -> Tensor:
    """Half the mean squared error, so that the Hessian of a linear model is x x^T."""
    return 0.5 * F.mse_loss(output, target.view_as(output))


BUILT_IN = tuple(LOSSES)


def built_in_name(loss: Loss) -> str:
    """Return the name of a built-in loss, whose properties are known, or an empty string for a custom loss."""
    return next((name for name in BUILT_IN if LOSSES.find(name) is loss), "")


def as_loss(loss: Any) -> Loss:
    if isinstance(loss, str):
        return LOSSES.find(loss)
    if not callable(loss):
        raise UsageError(f"loss must be a name ({', '.join(LOSSES)}) or a function of (output, target), got {shown(loss)}")
    if isinstance(loss, type):
        raise UsageError(f"loss must be a function of (output, target), got the class {loss.__name__}; pass an instance, {loss.__name__}()")
    return loss  # type: ignore[no-any-return]


def criterion_of(data: Data, loss: Any, task: Any, metrics: Any = None) -> Loss:
    """The loss: that of a task if one is given or comes with the data, else the loss given, else the data's own."""
    if loss is not None:
        if task is not None or metrics is not None:
            raise UsageError("give a task or a loss, not both; mf.tasks.Custom turns your own loss into a task with metrics")
        return as_loss(loss)
    task = data.task if task is None else task
    if task is None and metrics is not None:
        task = "classification" if data.num_classes else "regression"
    return as_loss(data.loss) if task is None else make_task(task, metrics)
