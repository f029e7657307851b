"""Normalisation over the samples of a padded batch: statistics of BatchNorm count the real samples only, as in a batch without padding."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

BATCH_NORM = (F.batch_norm, torch.batch_norm)


# These functions use PyTorch's parameter names, so that calls with keyword arguments are parsed as well.


def batch_norm_call(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, bool, Any, float]:
    return input, running_mean, running_var, weight, bias, training, momentum, eps


def instance_norm_call(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, bool, float, float]:
    return input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps


class Padded(TorchFunctionMode):
    """Computes batch statistics over the real samples while it is active.

    `weights` [B] has a positive entry per real sample and 0 for the padding; the entries sum to 1. Without it, every sample counts.
    """

    def __init__(self, weights: Tensor | None) -> None:
        super().__init__()
        self.weights = weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BATCH_NORM:
            x, mean, variance, weight, bias, training, momentum, eps = batch_norm_call(*args, **kwargs)
            if training:
                return batch_norm(x, mean, variance, weight, bias, momentum, eps, self.weights)
            if mean is not None and variance is not None:
                return frozen_batch_norm(x, mean, variance, weight, bias, eps)
        if func is F.instance_norm:
            x, mean, variance, weight, bias, own, momentum, eps = instance_norm_call(*args, **kwargs)
            if own and mean is not None and variance is not None:
                update_of_instances(x, mean, variance, momentum, self.weights)
                return F.instance_norm(x, None, None, weight, bias, True, momentum, eps)
        return func(*args, **kwargs)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: Any,
    eps: float,
    weights: Tensor | None,
) -> Tensor:
    """BatchNorm [B, C, ...] in training mode; updates the running statistics in place."""
    F._verify_batch_size(list(x.shape))  # type: ignore[attr-defined]  # refuses one value per channel
    positions = x[0, 0].numel()
    share, count = _shares(weights, x)
    share, count = share / positions, count * positions
    y, mean, variance = Standardize.apply(x.to(torch.promote_types(x.dtype, torch.float32)), share, eps)
    _update(running_mean, mean.flatten(), momentum)
    _update(running_var, variance.flatten() * (count / (count - 1)), momentum)
    return _scaled(y, weight, bias, x)


def frozen_batch_norm(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """BatchNorm [B, C, ...] with fixed statistics; unlike PyTorch's rule for `vmap`, it keeps the layout of its input."""
    y = (x - _by_channel(mean, x)) * _by_channel((variance + eps).rsqrt(), x)
    return _scaled(y, weight, bias, x)


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> Tensor:
    y = y if weight is None else y * _by_channel(weight, x)
    y = y if bias is None else y + _by_channel(bias, x)
    return y.to(x.dtype)


class Standardize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) with one mean and variance per channel, which are also returned; `share` sums to 1 per channel.

    The backward pass uses the closed form, one pass of sums, so that a compiler can fuse it with what comes before and after.
    """

    generate_vmap_rule = True
    apply: Any

    @staticmethod
    def forward(x: Tensor, share: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        over = (0, *range(2, x.ndim))
        mean = (x * share).sum(over, keepdim=True)
        variance = ((x - mean).square() * share).sum(over, keepdim=True)
        return (x - mean) * (variance + eps).rsqrt(), mean, variance

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, share, ctx.eps = inputs
        ctx.save_for_backward(x, share, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        x, share, mean, variance = ctx.saved_tensors
        over, inverse = (0, *range(2, x.ndim)), (variance + ctx.eps).rsqrt()
        y = (x - mean) * inverse
        return (dy - share * (dy.sum(over, keepdim=True) + y * (dy * y).sum(over, keepdim=True))) * inverse, None, None


def update_of_instances(x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, weights: Tensor | None) -> None:
    """Update the running statistics of InstanceNorm in place: means over the real samples of each sample's statistics."""
    share, _ = _shares(weights, x)
    v = x.detach().to(torch.promote_types(x.dtype, torch.float32)).flatten(2)
    share = share.view(-1, 1)
    _update(running_mean, (v.mean(2) * share).sum(0), momentum)
    _update(running_var, (v.var(2) * share).sum(0), momentum)


def _shares(weights: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's share of the statistics [B, 1, ...], and the number of rows that count.

    If the model has merged another dimension into the first, its rows share the sample's weight.
    """
    if weights is None:
        weights = x.new_full((len(x),), 1 / len(x), dtype=torch.promote_types(x.dtype, torch.float32))
    if len(x) % len(weights):
        raise RuntimeError(f"a normalisation layer gets {len(x)} rows for {len(weights)} samples")
    rows = len(x) // len(weights)
    each = weights / rows if rows == 1 else (weights / rows).repeat_interleave(rows)
    return each.view(-1, *[1] * (x.ndim - 1)), (weights > 0).sum().to(weights.dtype) * rows


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.ndim - 2))


def _update(running: Tensor | None, value: Tensor, momentum: Any) -> None:
    if running is not None:
        with torch.no_grad():
            factor = momentum.to(running.dtype) if isinstance(momentum, Tensor) else momentum
            running += factor * (value.detach().to(running.dtype) - running)


class Recorded(TorchFunctionMode):
    """Records how many values per channel and sample enter batch statistics: the fewest of any layer, 0 if there is no such layer."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples, self.values = samples, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in BATCH_NORM:
            x, *_, training, _, _ = batch_norm_call(*args, **(kwargs or {}))
            if training:
                here = x[:, 0].numel() // self.samples
                self.values = min(self.values or here, here)
        return func(*args, **(kwargs or {}))
