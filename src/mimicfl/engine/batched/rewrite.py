"""While a model runs stacked, some of its calls are answered differently: convolutions by ours, dropout by keyed chance."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..calls import DROPOUT, conv2d_call, dropout_call, pair
from .convolution import Conv

_WORD = (1 << 32) - 1
_STEP, _SITE, _MIX = 0x9E3779B97F4A7C15 - (1 << 64), 0x3C79AC492BA7B653, 0x1C69B3F74AC4AE35


class Stackable(TorchFunctionMode):
    """Give it the number that stands for (seed, round, client, step): all chance in the model's layers follows from it.
    `precision` is that of our convolutions where they use tensor cores (the weights' gradient); None leaves convolutions alone."""

    def __init__(self, key: Tensor, precision: str | None) -> None:
        super().__init__()
        self.key, self.precision, self.site = key, precision, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d and self.precision:
            x, w, bias, stride, padding, dilation, groups = conv2d_call(*args, **kwargs)
            if groups == 1 and x.ndim == 4 and not isinstance(padding, str):  # the rest our kernels do not do
                y = Conv.apply(x, w, *[list(pair(n)) for n in (stride, padding, dilation)], self.precision)
                return y if bias is None else y + bias.view(-1, 1, 1)
        if func in DROPOUT:
            return self._dropout(func is not F.dropout, *dropout_call(*args, **kwargs))
        return func(*args, **kwargs)

    def _dropout(self, whole_channels: bool, x: Tensor, p: float, training: bool) -> Tensor:
        if not training or p == 0.0:
            return x
        self.site += 1
        shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if whole_channels else x.shape
        keep = chance(self.key + _signed(_SITE * self.site), shape) >= p
        return torch.where(keep, x / (1 - p) if p < 1 else torch.zeros_like(x), 0.0)


def chance(key: Tensor, shape: Any) -> Tensor:
    """Uniform numbers in [0, 1) that depend on the key and the place alone: three rounds of multiply and fold, of the key first.

    Neighbouring keys must not give neighbouring stretches of one sequence. (The sum comes before the product because the compiler
    takes a place alone for a small number, which it cannot multiply by a large one.)
    """
    z = (torch.arange(torch.Size(shape).numel(), device=key.device) + _folded(key)) * _STEP
    return (((_folded(z) >> 40) & 0xFFFFFF).to(torch.float32) / (1 << 24)).view(shape)


def _signed(number: int) -> int:
    """As 64 bits hold it: the products of numbers wrap around, those of Python do not."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _folded(z: Tensor) -> Tensor:
    for _ in range(3):
        z = (z ^ ((z >> 32) & _WORD)) * _MIX
    return z
