"""What a model calls while it runs: recognised however the call is written, and answered otherwise where an engine needs it."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

DROPOUT = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)  # what the fast engines draw by keys of their own
LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


# PyTorch's own names for the parameters, so that a call with keywords is understood as well.


def conv2d_call(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor | None, Any, Any, Any, int]:
    return input, weight, bias, stride, padding, dilation, groups


def dropout_call(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[Tensor, float, bool]:
    return input, p, training


def pair(value: Any) -> tuple[int, ...]:
    """A size of a layer as two numbers, however it was given: 2, (2,) or (2, 3)."""
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))


def without_dropout(model: nn.Module, inputs: Tensor) -> nn.Module | None:
    """A copy whose dropout lets everything through; None if it has none. Engines draw differently, so they are compared so."""
    quiet = copy.deepcopy(model).to(inputs.device).train()
    layers = [layer for layer in quiet.modules() if isinstance(layer, LAYERS)]
    for layer in layers:
        layer.p = 0.0
    called = WithoutDropout()
    with torch.no_grad(), torch.random.fork_rng(devices=[inputs.device] if inputs.is_cuda else []), called:
        quiet(inputs)
    if called.seen:
        kind = type(quiet)
        quiet.__class__ = type(kind.__name__, (Quiet, kind), {})  # not a wrapper module: parameters and buffers keep their names
    return quiet if called.seen or layers else None


class WithoutDropout(TorchFunctionMode):
    """Dropout called as a function lets everything through as well."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in DROPOUT:
            return func(*args, **(kwargs or {}))
        x, p, training = dropout_call(*args, **(kwargs or {}))
        self.seen |= training and p > 0
        return x


class Quiet:
    """Mixed in before a module's class; calls it without dropout."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with WithoutDropout():
            return super().forward(*inputs, **named)  # type: ignore[misc]
