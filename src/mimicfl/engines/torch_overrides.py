"""Intercepts PyTorch calls of a running model, however the call is written, so that an engine can replace them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..clients.params import copy_sharing_frozen
from ..data.samples import Samples, forward, tensors

DROPOUT = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)  # the fast engines draw these masks from their own keys
LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


# These functions use PyTorch's parameter names, so that calls with keyword arguments are parsed as well.


def conv2d_call(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor | None, Any, Any, Any, int]:
    return input, weight, bias, stride, padding, dilation, groups


def dropout_call(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[Tensor, float, bool]:
    return input, p, training


def pair(value: Any) -> tuple[int, ...]:
    """Return a layer's size as two numbers; accepts 2, (2,) and (2, 3)."""
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))


def without_dropout(model: nn.Module, inputs: Samples) -> nn.Module | None:
    """Return a copy of the model with dropout disabled, or None if it has no dropout.

    Engines draw dropout masks differently, so they are compared without dropout.
    """
    device = tensors(inputs)[0].device
    no_dropout = copy_sharing_frozen(model, device).train()
    layers = [layer for layer in no_dropout.modules() if isinstance(layer, LAYERS)]
    for layer in layers:
        layer.p = 0.0
    called = WithoutDropout()
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), called:
        forward(no_dropout, inputs)
    if called.seen:
        kind = type(no_dropout)
        no_dropout.__class__ = type(kind.__name__, (NoDropout, kind), {})  # not a wrapper module: parameters and buffers keep their names
    return no_dropout if called.seen or layers else None


class WithoutDropout(TorchFunctionMode):
    """Disables dropout that is called as a function; `seen` records whether there was any."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in DROPOUT:
            return func(*args, **(kwargs or {}))
        x, p, training = dropout_call(*args, **(kwargs or {}))
        self.seen |= training and p > 0
        return x


class NoDropout:
    """Mixed in before a module's class; disables functional dropout in its forward pass."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with WithoutDropout():
            return super().forward(*inputs, **named)  # type: ignore[misc]
