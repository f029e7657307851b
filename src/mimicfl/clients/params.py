"""The trainable parameters of a module as one flat vector [d].

`Workspace` holds a copy of a module whose parameters are views of one vector `w` and whose gradients are views of one vector
`grad`. A backward pass fills `grad`, and a vector operation on `w` updates the whole model, without copies.
"""

import copy
import fnmatch
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import UsageError, first_line, nearest

HALF = {torch.float16, torch.bfloat16}


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def travelling(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors that a server and its clients exchange, by name: trainable parameters, and buffers that belong to the model's state.

    Frozen parameters are not among them, and tied parameters only once.
    """
    kept = module.state_dict().keys()  # without buffers that are not persistent
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return dict(parameters), {name: b for name, b in module.named_buffers() if name in kept}


def flatten(module: nn.Module) -> Tensor:
    """Return the trainable parameters of a module as a new vector [d], float32 if they are in half precision."""
    parts = [p.detach().reshape(-1) for p in trainable(module)]
    return torch.cat([part.float() if part.dtype in HALF else part for part in parts])


def load(module: nn.Module, w: Tensor) -> nn.Module:
    """Copy the vector `w` into the module's trainable parameters."""
    parameters = trainable(module)
    if w.numel() != (expected := sum(p.numel() for p in parameters)):
        raise UsageError(f"the vector has {w.numel()} numbers but the model has {expected} trainable parameters; it is from another model")
    for p, part in zip(parameters, w.split([p.numel() for p in parameters]), strict=True):
        p.data.copy_(part.view_as(p))
    return module


def check_weights(module: nn.Module) -> None:
    """Raise a `UsageError` unless every parameter and buffer has a shape and values, and trainable parameters are real."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise UsageError(f"{name} of the model has no shape yet (a lazy layer); pass a batch through the model first, model(x)")
        if tensor.is_meta:
            raise UsageError(f"{name} of the model is on the meta device and holds no values; build the model on the CPU")
        if tensor.is_complex() and tensor.requires_grad:
            raise UsageError(f"{name} of the model is complex; trainable parameters must be real numbers")


def multipliers(module: nn.Module, patterns: Sequence[tuple[str, float]]) -> list[float]:
    """Return the learning-rate multiplier of every trainable parameter; the first pattern that matches its name applies.

    Raises a `UsageError` for a pattern that matches no trainable parameter.
    """
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    for pattern, _ in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"lr_multipliers: {pattern!r} matches no trainable parameter; {nearest(pattern, names)}")
    return [next((factor for pattern, factor in patterns if fnmatch.fnmatchcase(name, pattern)), 1.0) for name in names]


def copy_sharing_frozen(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of the module on the device. It shares frozen parameters that are already there, since they never change."""
    frozen = [p for p in module.parameters() if not p.requires_grad]
    shared = all(p.device.type == device.type and device.index in (None, p.device.index) for p in frozen)  # cuda is the current GPU
    try:
        copied = copy.deepcopy(module, {id(p): p for p in frozen} if shared else None)
        return copied.to(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"the model cannot be copied: {first_line(error)}") from error


@dataclass(frozen=True)
class Terms:
    """What an algorithm adds to each gradient: shift + mu (w - start)."""

    shift: Tensor | float
    mu: float
    start: Tensor

    def added_to(self, h: Tensor, w: Tensor) -> Tensor:
        if isinstance(self.shift, Tensor) or self.shift != 0.0:
            h = h + self.shift
        return h + self.mu * (w - self.start) if self.mu else h


class Workspace:
    """A copy of the model on the device, trained in place by one client after the other.

    The vectors are float32 or float64. Parameters in half precision are rounded copies of their part of `w`.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        check_weights(module)
        self.module = copy_sharing_frozen(module, device)
        self.parameters = trainable(self.module)
        if not self.parameters:
            raise UsageError("the model has no trainable parameters; set requires_grad for at least one")
        kinds = {p.dtype for p in self.parameters}
        if len(kinds - HALF) > 1 or (kinds & HALF and torch.float64 in kinds):
            raise UsageError("the model mixes parameter types; convert it with model.float() or model.double()")
        self.w = flatten(self.module)  # [d]
        if device.type == "cuda":
            self.w = _prepare_recurrent(self.module, self.w)
        self.grad = torch.zeros_like(self.w)  # [d]
        self.sizes = [p.numel() for p in self.parameters]
        self.rounded: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # parameters in half precision, with their parts of w and grad
        for p, w, g in zip(self.parameters, self.w.split(self.sizes), self.grad.split(self.sizes), strict=True):
            if p.dtype in HALF:
                self.rounded.append((p, w.view(p.shape), g.view(p.shape)))
            else:
                p.data = w.view(p.shape)
                p.grad = g.view(p.shape)
        if self.input_dtype in HALF:
            self.module.register_forward_hook(_in_float32)
        self._scales: dict[Any, Tensor] = {}

    @property
    def input_dtype(self) -> torch.dtype:
        """The type of inputs that are real numbers: that of the model's first parameter if it is half precision, else that of w."""
        first = next(self.module.parameters()).dtype
        return first if first in HALF else self.w.dtype

    def zero_grad(self) -> None:
        self.grad.zero_()
        for p, _, _ in self.rounded:
            p.grad = None

    def gradient(self) -> Tensor:
        """Return the gradient after a backward pass, [d]."""
        for p, _, g in self.rounded:
            if p.grad is not None:
                g.copy_(p.grad)
        return self.grad

    def descend(self, g: Tensor, eta: float, terms: Terms) -> None:
        """Take a gradient step after a backward pass, and add it to g."""
        self.apply(terms.added_to(self.gradient(), self.w), g, eta)

    def apply(self, h: Tensor, g: Tensor, eta: float) -> None:
        """w = w - eta h, g = g + h."""
        g += h
        self.w.sub_(h, alpha=eta)
        self.refresh()

    def refresh(self) -> None:
        """Round w again after it has changed; without half precision the parameters are w itself."""
        for p, w, _ in self.rounded:
            p.data.copy_(w)

    def scale(self, patterns: Sequence[tuple[str, float]]) -> Tensor | None:
        """Return the learning-rate multipliers as a vector [d]; None if all of them are 1."""
        if not patterns:
            return None
        key = tuple(patterns)
        if key not in self._scales:
            factors = torch.tensor(multipliers(self.module, patterns), dtype=self.w.dtype, device=self.w.device)
            self._scales[key] = factors.repeat_interleave(torch.tensor(self.sizes, device=self.w.device))
        return self._scales[key]

    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the module's current buffers (running means, counters)."""
        return {name: b.detach().clone() for name, b in self.module.named_buffers()}

    def load(self, w: Tensor, buffers: dict[str, Tensor]) -> None:
        self.w.copy_(w)
        self.refresh()
        if buffers:
            held = dict(self.module.named_buffers())
            for name, value in buffers.items():
                held[name].copy_(value)


def mix_in(layer: nn.Module, first: type) -> None:
    """Put a class before the module's own; the module keeps its name, parameters and buffers."""
    layer.__class__ = type(type(layer).__name__, (first, type(layer)), {})


def _prepare_recurrent(module: nn.Module, w: Tensor) -> Tensor:
    """Prepare recurrent layers whose weights will be parts of w on a GPU; return w, moved if necessary.

    If a layer without biases is the first of w, PyTorch takes the memory of w for the layer's own and reads what follows as its biases.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    for layer in layers:
        mix_in(layer, WithoutMemoryWarning)
    if all(layer.bias for layer in layers):
        return w
    moved = w.new_empty(64 + w.numel())[64:]  # a multiple of what libraries want memory to be aligned to
    return moved.copy_(w)


class WithoutMemoryWarning:
    """Mixed in before a recurrent layer: its weights are parts of a vector, and PyTorch advises against that in every call."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            return super().forward(*inputs, **named)  # type: ignore[misc]


def _in_float32(module: nn.Module, inputs: Any, output: Any) -> Any:
    """The outputs that custom loops see; `as_tensor` converts those of every other model."""
    return output.float() if isinstance(output, Tensor) and output.dtype in HALF else output
