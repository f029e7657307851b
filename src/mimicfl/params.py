"""A module's trainable parameters as one flat vector [d], and back as views.

`Workspace` owns a copy of a module whose parameters are windows into one vector `w` and whose gradients are windows
into one vector `grad`: a backward pass fills `grad`, a vector operation on `w` moves the whole model, nothing is copied.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .errors import UsageError, first_line


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def flatten(module: nn.Module) -> Tensor:
    """The trainable parameters of a module as a new vector [d]."""
    return torch.cat([p.detach().reshape(-1) for p in trainable(module)])


def load(module: nn.Module, w: Tensor) -> nn.Module:
    """Copy the vector `w` into the module's trainable parameters."""
    parameters = trainable(module)
    if w.numel() != (expected := sum(p.numel() for p in parameters)):
        raise UsageError(f"the vector has {w.numel()} numbers but the model has {expected} trainable parameters; it is from another model")
    for p, part in zip(parameters, w.split([p.numel() for p in parameters]), strict=True):
        p.data.copy_(part.view_as(p))
    return module


def check_weights(module: nn.Module) -> None:
    """Every parameter and buffer must hold real numbers."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise UsageError(f"{name} of the model has no shape yet (a lazy layer); pass a batch through the model first, model(x)")
        if tensor.is_meta:
            raise UsageError(f"{name} of the model is on the meta device and holds no values; build the model on the CPU")
        if tensor.is_complex() and tensor.requires_grad:
            raise UsageError(f"{name} of the model is complex; trainable parameters must be real numbers")


class Workspace:
    """One resident copy of the model, trained in place by every client in turn."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        check_weights(module)
        try:
            self.module = copy.deepcopy(module).to(device)
        except (RuntimeError, TypeError) as error:
            raise UsageError(f"the model cannot be copied: {first_line(error)}") from error
        parameters = trainable(self.module)
        if not parameters:
            raise UsageError("the model has no trainable parameters: nothing can be learned")
        if len({p.dtype for p in parameters}) > 1:
            raise UsageError("the model mixes parameter types; convert it with model.float() or model.double()")
        self.w = flatten(self.module)  # [d]
        self.grad = torch.zeros_like(self.w)  # [d]
        sizes = [p.numel() for p in parameters]
        for p, w, g in zip(parameters, self.w.split(sizes), self.grad.split(sizes), strict=True):
            p.data = w.view(p.shape)
            p.grad = g.view(p.shape)

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the module's buffers (running means, counters) as they are now."""
        return {name: b.detach().clone() for name, b in self.module.named_buffers()}

    def load(self, w: Tensor, buffers: dict[str, Tensor]) -> None:
        self.w.copy_(w)
        if buffers:
            held = dict(self.module.named_buffers())
            for name, value in buffers.items():
                held[name].copy_(value)


def average_buffers(stacked: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Buffers [m, ...] of the active clients as one: floating ones averaged, counters take the largest."""
    merged = {}
    for name, rows in stacked.items():
        if bool((rows == rows[0]).all()):
            merged[name] = rows[0]  # constants stay what they are, to the bit
        elif rows.is_floating_point():
            merged[name] = torch.einsum("m,m...->...", weights.to(rows.dtype), rows)
        else:
            merged[name] = rows.amax(dim=0)
    return merged
