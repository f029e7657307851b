"""Replaces PyTorch calls of a stacked model: those that `vmap` cannot stack well, and dropout by one with keyed random numbers."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...padding import Padded
from ...torch_overrides import COMPOSED, DROPOUT, attention_call, conv2d_call, dropout_call, is_packed, max_pool2d_call, pair
from . import recurrent
from .attention import ShortAttention, attention, is_short
from .convolution import Conv
from .normalization import group_norm
from .pooling import MOST, max_pool

_WORD = (1 << 32) - 1
_STEP, _SITE, _MIX = 0x9E3779B97F4A7C15 - (1 << 64), 0x3C79AC492BA7B653, 0x1C69B3F74AC4AE35


class Stackable(Padded):
    """Replaces convolutions, attention, recurrent layers, dropout and batch statistics while it is active.

    `key` is derived from (seed, round, client, step) and determines every dropout mask. `precision` applies to the tensor cores in our
    convolutions; None keeps PyTorch's, and its attention, for clients that are not stacked. `channels_last` also
    replaces what would copy images in this layout. `weights` are those of the samples, 0 for the padding of a short batch.
    """

    def __init__(self, key: Tensor, precision: str | None, weights: Tensor | None = None, channels_last: bool = False) -> None:
        super().__init__(weights)
        self.key, self.precision, self.channels_last, self.site = key, precision, channels_last, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = REPLACED[func](self, func, *args, **(kwargs or {})) if func in REPLACED else NotImplemented
        return super().__torch_function__(func, types, args, kwargs) if found is NotImplemented else found

    # Each of these replaces some functions, or returns NotImplemented if this call of the function can stay.

    def _convolution(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        x, w, bias, stride, padding, dilation, groups = conv2d_call(*args, **kwargs)
        depthwise = groups > 1 and w.shape[1] == 1  # stacked, they are one depthwise convolution, for which PyTorch has kernels
        if not self.precision or depthwise or x.ndim != 4 or isinstance(padding, str):
            return NotImplemented
        y = Conv.apply(x, w, *[list(pair(n)) for n in (stride, padding, dilation)], self.precision, groups)
        return y if bias is None else y + bias.view(-1, 1, 1)

    def _pool(self, func: Any, input: Tensor, output_size: Any) -> Any:
        """Replace a mean over the image, for which PyTorch's rule for `vmap` treats clients one by one if channels are last."""
        whole = self.channels_last and output_size in (1, (1, 1), [1, 1])
        return input.mean((-2, -1), keepdim=True) if whole else NotImplemented

    def _max_pool(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        x, kernel, stride, padding, dilation, ceil, indices = max_pool2d_call(*args, **kwargs)
        kernel, simple = pair(kernel), (pair(padding), pair(dilation), ceil, indices) == ((0, 0), (1, 1), False, False)
        apart = stride is None or stride == [] or pair(stride) == kernel
        fits = x.ndim == 4 and math.prod(kernel) <= MOST and all(n >= k for n, k in zip(x.shape[-2:], kernel, strict=True))
        return max_pool(x, kernel) if self.channels_last and simple and apart and fits else NotImplemented

    def _group_norm(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return group_norm(*args, **kwargs) if self.channels_last else NotImplemented

    def _composed(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        with self:
            return COMPOSED[func](*args, **kwargs)

    def _attention(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value, mask, p, *how = attention_call(*args, **kwargs)  # how: causal, scale, grouped
        if not self.precision and p == 0.0:
            return NotImplemented
        if p == 0.0 and is_short(query, key, value, mask):
            causal, scale, _ = how
            return ShortAttention.apply(query, key, value, causal, query.shape[-1] ** -0.5 if scale is None else scale)
        return attention(query, key, value, mask, lambda weights: self._dropout(False, weights, p, True), *how)  # type: ignore[arg-type]

    def _normalize(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace a call with `out=`, as in spectral_norm."""
        out = kwargs.pop("out", None)
        return NotImplemented if out is None else out.copy_(F.normalize(*args, **kwargs))

    def _one_hot(self, func: Any, tensor: Tensor, num_classes: int = -1) -> Any:
        """PyTorch's own function looks at the values, to check them."""
        return NotImplemented if num_classes < 0 else (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).long()

    def _cell(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return recurrent.cell(func, *args, **kwargs)

    def _recurrent(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if is_packed(args):
            return NotImplemented
        return recurrent.layers(func, lambda x, p, training: self._dropout(False, x, p, training), *args, **kwargs)

    def _any_dropout(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return self._dropout(func is not F.dropout, *dropout_call(*args, **kwargs))

    def _dropout(self, whole_channels: bool, x: Tensor, p: float, training: bool) -> Tensor:
        if not training or p == 0.0:
            return x
        self.site += 1
        shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if whole_channels else x.shape
        keep = uniform(self.key + _signed(_SITE * self.site), shape) >= p
        return torch.where(keep, x / (1 - p) if p < 1 else torch.zeros_like(x), 0.0)


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.conv2d: Stackable._convolution,
    F.adaptive_avg_pool2d: Stackable._pool,
    F.max_pool2d: Stackable._max_pool,
    torch.max_pool2d: Stackable._max_pool,
    F.group_norm: Stackable._group_norm,
    F.scaled_dot_product_attention: Stackable._attention,
    F.normalize: Stackable._normalize,
    F.one_hot: Stackable._one_hot,
    **dict.fromkeys(COMPOSED, Stackable._composed),
    **dict.fromkeys(recurrent.CELLS, Stackable._cell),
    **dict.fromkeys(recurrent.LAYERS, Stackable._recurrent),
    **dict.fromkeys(DROPOUT, Stackable._any_dropout),
}


def uniform(key: Tensor, shape: Any) -> Tensor:
    """Return uniform numbers in [0, 1) that depend only on the key and the position, by hashing both.

    The key is hashed first, so that neighbouring keys do not give overlapping sequences. The sum precedes the product because the
    compiler treats a bare position as a small integer, which it cannot multiply by a 64-bit constant.
    """
    z = (torch.arange(torch.Size(shape).numel(), device=key.device) + _folded(key)) * _STEP
    return (((_folded(z) >> 40) & 0xFFFFFF).to(torch.float32) / (1 << 24)).view(shape)


def _signed(number: int) -> int:
    """Wrap a Python integer to signed 64 bits, as tensor arithmetic does."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _folded(z: Tensor) -> Tensor:
    for _ in range(3):
        z = (z ^ ((z >> 32) & _WORD)) * _MIX
    return z
