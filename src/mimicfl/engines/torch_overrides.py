"""Intercepts PyTorch calls of a running model, however the call is written, so that an engine can replace them."""

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..clients.params import copy_sharing_frozen, mix_in
from ..data.samples import Samples, forward, tensors

RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
DROPOUT = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)  # the fast engines draw these masks from their own keys
LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


# These functions use PyTorch's parameter names, so that calls with keyword arguments are parsed as well.


def conv2d_call(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor | None, Any, Any, Any, int]:
    return input, weight, bias, stride, padding, dilation, groups


def dropout_call(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[Tensor, float, bool]:
    return input, p, training


def max_pool2d_call(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Tensor, Any, Any, Any, Any, bool, bool]:
    return input, kernel_size, stride, padding, dilation, ceil_mode, return_indices


def attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool, float | None, bool]:
    return query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa


def is_packed(arguments: Sequence[Any]) -> bool:
    """Whether a recurrent layer is called with a packed sequence: its batch sizes precede the state and the parameters."""
    return isinstance(arguments[3], (list, tuple))


def seen_inside(function: Any) -> Any:
    """Return a copy of a PyTorch function that is written in Python, without its own dispatch: a mode then sees the calls inside it."""
    ours = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copied = types.FunctionType(function.__code__, ours, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


COMPOSED = {F.multi_head_attention_forward: seen_inside(F.multi_head_attention_forward)}


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
        mix_in(no_dropout, NoDropout)
    return no_dropout if called.seen or layers else None


class WithoutDropout(TorchFunctionMode):
    """Disables dropout that is called as a function; `seen` records whether there was any."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUT:
            x, p, training = dropout_call(*args, **kwargs)
            self.seen |= training and p > 0
            return x
        if func in COMPOSED:
            with self:
                return COMPOSED[func](*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            query, key, value, mask, p, causal, scale, grouped = attention_call(*args, **kwargs)
            self.seen |= p > 0
            more = {"enable_gqa": True} if grouped else {}  # PyTorch 2.4 does not know it
            return func(query, key, value, mask, 0.0, causal, scale=scale, **more)
        if func in RECURRENT:
            at = 6 if is_packed(args) else 5  # where the probability is; whether the layer trains follows
            self.seen |= args[at + 1] and args[at] > 0
            args = (*args[:at], 0.0, *args[at + 1 :])
        return func(*args, **kwargs)


class NoDropout:
    """Mixed in before a module's class; disables functional dropout in its forward pass."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with WithoutDropout():
            return super().forward(*inputs, **named)  # type: ignore[misc]
