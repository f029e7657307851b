"""Losses by name: mean over the batch of (model output, target)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..errors import UsageError, shown
from ..registry import Registry

Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: Registry[Any] = Registry("loss", ("loss",))
register = LOSSES.register


@register("cross-entropy")
def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """For classes 0..C-1, output [B, C]."""
    return F.cross_entropy(output, target)


@register("binary")
def binary(output: Tensor, target: Tensor) -> Tensor:
    """For two classes with a single output, positive meaning class 1."""
    return F.binary_cross_entropy_with_logits(output.view(-1), target.view(-1).to(output.dtype))


@register("mse")
def mse(output: Tensor, target: Tensor) -> Tensor:
    """Half the mean squared error, so that a quadratic's Hessian is x x^T."""
    return 0.5 * F.mse_loss(output, target.view_as(output))


BUILT_IN = tuple(LOSSES)


def built_in_name(loss: Loss) -> str:
    """What a loss of ours is called, about which more is known than about others'; nothing for those."""
    return next((name for name in BUILT_IN if LOSSES.find(name) is loss), "")


def as_loss(loss: Any) -> Loss:
    if isinstance(loss, str):
        return LOSSES.find(loss)
    if not callable(loss):
        raise UsageError(f"loss must be a name ({', '.join(LOSSES)}) or a function of (output, target), got {shown(loss)}")
    if isinstance(loss, type):
        raise UsageError(f"loss must be a function of (output, target), got the class {loss.__name__}; pass an instance, {loss.__name__}()")
    return loss  # type: ignore[no-any-return]
