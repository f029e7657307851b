"""Samples of any shape: a tensor, a dict of tensors (the model's keywords) or a tuple of tensors (its positional arguments)."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UsageError, shown
from .arrays import owned_tensor

Samples = Tensor | dict[str, Tensor] | tuple[Tensor, ...]
S = TypeVar("S", bound=Samples)


def mapped(function: Callable[[Tensor], Tensor], samples: Samples) -> Samples:
    """Apply a function to every tensor."""
    if isinstance(samples, Tensor):
        return function(samples)
    if isinstance(samples, dict):
        return {name: function(x) for name, x in samples.items()}
    return tuple(function(x) for x in samples)


def tensors(samples: Samples) -> list[Tensor]:
    if isinstance(samples, Tensor):
        return [samples]
    return list(samples.values()) if isinstance(samples, dict) else list(samples)


def named(samples: Samples, name: str) -> dict[str, Tensor]:
    """The tensors by name: `x_train`, or `x_train['mask']` and `x_train[1]` for the entries of a dict or tuple."""
    if isinstance(samples, Tensor):
        return {name: samples}
    entries = samples.items() if isinstance(samples, dict) else enumerate(samples)
    return {f"{name}[{key!r}]": x for key, x in entries}


def single(samples: Samples) -> Tensor:
    """Samples that are one tensor, for code that only handles these."""
    if not isinstance(samples, Tensor):
        raise TypeError("the samples have several inputs")
    return samples


def count(samples: Samples) -> int:
    """The number of samples."""
    return len(tensors(samples)[0])


def rows(samples: Samples, index: Any) -> Samples:
    """The samples with these row numbers, or in this slice."""
    if isinstance(samples, Tensor):
        return samples[index]
    return mapped(lambda x: x[index], samples)


def parts(samples: Samples, size: int) -> Iterator[Samples]:
    """The samples in slices of at most `size`."""
    for begin in range(0, count(samples), size):
        yield rows(samples, slice(begin, begin + size))


def joined(a: S, b: S) -> S:
    """The samples of two parts with the same entries, one after the other."""
    both = [torch.cat(pair) for pair in zip(tensors(a), tensors(b), strict=True)]
    if isinstance(a, Tensor):
        return both[0]  # type: ignore[return-value]
    return dict(zip(a, both, strict=True)) if isinstance(a, dict) else tuple(both)  # type: ignore[return-value]


def clone(samples: Samples) -> Samples:
    return mapped(torch.clone, samples)


def shapes(samples: Samples) -> str:
    """The shape of one sample, in words."""
    if isinstance(samples, Tensor):
        return str(tuple(samples.shape[1:]))
    entries = samples.items() if isinstance(samples, dict) else enumerate(samples)
    return ", ".join(f"{key}: {tuple(x.shape[1:])}" for key, x in entries)


def arguments(samples: Samples) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """How a batch is passed to the model: positional arguments and keywords."""
    if isinstance(samples, Tensor):
        return (samples,), {}
    return ((), samples) if isinstance(samples, dict) else (samples, {})


def forward(module: nn.Module, samples: Samples) -> Tensor:
    """The model's output on a batch, as one tensor."""
    if isinstance(samples, Tensor):
        return as_tensor(module(samples))
    positions, keywords = arguments(samples)
    return as_tensor(module(*positions, **keywords))


def as_tensor(output: Any) -> Tensor:
    """The output as one tensor: of an object or dict with `logits`, as models of `transformers` return it, these logits.

    Outputs in half precision become float32, in which losses and metrics are computed.
    """
    found = output
    if not isinstance(output, Tensor):
        found = output["logits"] if isinstance(output, Mapping) and "logits" in output else getattr(output, "logits", output)
    half = isinstance(found, Tensor) and found.dtype in (torch.float16, torch.bfloat16)
    return found.float() if half else found  # type: ignore[no-any-return]


def owned(value: Any, name: str) -> Samples:
    """Copy arrays given by the user, alone or in a dict or tuple, into tensors that nothing else can change."""
    if isinstance(value, Mapping):
        if not value or not all(isinstance(key, str) and key.isidentifier() for key in value):
            raise UsageError(f"the keys of {name} are passed to the model as keywords: they must be names, got {shown(list(value))}")
        found: Samples = {key: _entry(each, f"{name}[{key!r}]") for key, each in value.items()}
    elif isinstance(value, tuple) and value and all(isinstance(each, (Tensor, np.ndarray)) and each.ndim for each in value):
        found = tuple(_entry(each, f"{name}[{k}]") for k, each in enumerate(value))
    else:
        return owned_tensor(value, name)
    sizes = {key: len(x) for key, x in named(found, name).items()}
    if len(set(sizes.values())) > 1:
        different = ", ".join(f"{key} has {n}" for key, n in sizes.items())
        raise UsageError(f"every entry of {name} needs one row per sample: {different}")
    return found


def _entry(value: Any, name: str) -> Tensor:
    if isinstance(value, (Mapping, tuple)):
        raise UsageError(f"{name} must be a tensor or an array: dicts and tuples of samples cannot be nested")
    return owned_tensor(value, name)


def check_alike(what: str, train: Samples, test: Samples) -> None:
    """Training and test samples must have the same entries, with the same shapes."""
    if type(train) is not type(test):
        raise UsageError(f"training and test {what} differ in kind: {_kind(train)} and {_kind(test)}")
    ours, theirs = named(train, what), named(test, what)
    if ours.keys() != theirs.keys():
        raise UsageError(f"training and test {what} have different entries; only one of them has {min(ours.keys() ^ theirs.keys())}")
    for (name, a), b in zip(ours.items(), (theirs[name] for name in ours), strict=True):
        if a.shape[1:] != b.shape[1:]:
            raise UsageError(f"training and test {name} differ in shape: {tuple(a.shape[1:])} and {tuple(b.shape[1:])} per sample")


def paired(function: Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]], what: str, a: Samples, b: Samples) -> tuple[Samples, Samples]:
    """Apply a function to the name and the corresponding tensors of two parts with the same entries."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return function(what, a, b)
    theirs = named(b, what)
    found = [function(name, x, theirs[name]) for name, x in named(a, what).items()]
    if isinstance(a, dict):
        keys = list(a)
        return {key: pair[0] for key, pair in zip(keys, found, strict=True)}, {key: pair[1] for key, pair in zip(keys, found, strict=True)}
    return tuple(pair[0] for pair in found), tuple(pair[1] for pair in found)


def _kind(samples: Samples) -> str:
    return "a tensor" if isinstance(samples, Tensor) else f"a {type(samples).__name__}"
