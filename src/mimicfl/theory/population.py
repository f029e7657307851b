"""All clients' losses f_1 ... f_N as functions of the flat model vector: values, full gradients, curvature.

In evaluation mode and without augmentation, so that f_i is a fixed function: what dropout layers, BatchNorm's batch statistics and
random crops add is noise of the training, not part of the objective.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ..data.clients import Clients

Loss = Callable[[Tensor, Tensor], Tensor]
AT_ONCE = 4096  # samples that go through the model together


class Population:
    """f_i(w) is the mean loss over client i's samples; f = sum of share_i f_i, uniform unless told."""

    def __init__(self, model: nn.Module, clients: Clients, loss: Loss, share: Tensor | None = None) -> None:
        self.module = copy.deepcopy(model).to(clients.device).eval()
        self.clients, self.loss = clients, loss
        self.names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        self.shapes = [p.shape for p in self.module.parameters() if p.requires_grad]
        share = torch.ones(len(clients)) if share is None else share
        self.share = (share / share.sum()).to(clients.device, clients.dtype)  # [N]
        convolves = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in self.module.modules())
        self.stacked = not convolves or clients.device.type != "cpu"  # on a CPU stacked convolutions take twice the time
        self.passes = 0  # over all clients' samples, for the account of what was spent

    def gradients(self, w: Tensor, buffers: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """f_i(w) [N] and grad f_i(w) [N, d]: one pass over the data, clients of one size stacked."""
        self.passes += 1
        value, g = w.new_empty(len(self.clients)), w.new_empty(len(self.clients), w.numel())
        sizes = self.clients.sizes
        for size in np.unique(sizes):
            group = np.flatnonzero(sizes == size)
            if self.stacked and size <= AT_ONCE:
                for part in np.array_split(group, -(-len(group) * int(size) // AT_ONCE)):
                    value[part], g[part] = self._stack(w, buffers or {}, part)
            else:
                for i in group.tolist():
                    value[i], g[i] = self.gradient(w, self.clients.split[i], buffers)
        return value, g

    def mean(self, g: Tensor) -> Tensor:
        """grad f from the clients' gradients."""
        return self.share @ g

    def gradient(self, w: Tensor, rows: np.ndarray, buffers: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The mean loss over these samples and its gradient [d]."""
        total, g = w.new_zeros(()), torch.zeros_like(w)
        leaf = w.detach().clone().requires_grad_()
        for part, x, y in self._slices(rows):
            value = self._value(leaf, buffers or {}, x, y) * part
            g += torch.autograd.grad(value, leaf)[0]
            total += value.detach()
        return total, g

    def curvature(self, w: Tensor, i: int, v: Tensor, buffers: dict[str, Tensor] | None = None) -> Tensor:
        """The Hessian of f_i at w times v, [d]."""
        product = torch.zeros_like(w)
        leaf = w.detach().clone().requires_grad_()
        for part, x, y in self._slices(self.clients.split[i]):
            (g,) = torch.autograd.grad(self._value(leaf, buffers or {}, x, y) * part, leaf, create_graph=True)
            if g.requires_grad:  # a loss that is linear in w has no curvature
                product += torch.autograd.grad(g @ v, leaf)[0]
        return product

    def _slices(self, rows: np.ndarray) -> Iterator[tuple[float, Tensor, Tensor]]:
        for part in torch.from_numpy(rows).to(self.clients.device).split(AT_ONCE):
            x, y = self._samples(part)
            yield len(part) / len(rows), x, y

    def _samples(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.clients.data.inputs(self.clients.x[rows], self.clients.dtype), self.clients.y[rows]

    def _value(self, w: Tensor, buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        parts = w.split([shape.numel() for shape in self.shapes])
        given: dict[str, Any] = {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}
        return self.loss(functional_call(self.module, given | buffers, (x,)), y)

    def _stack(self, w: Tensor, buffers: dict[str, Tensor], group: np.ndarray) -> tuple[Tensor, Tensor]:
        """Clients of one size side by side."""
        rows = torch.from_numpy(np.stack([self.clients.split[i] for i in group])).to(self.clients.device)
        x, y = self._samples(rows.reshape(-1))
        x, y = x.view(*rows.shape, *x.shape[1:]), y.view(*rows.shape, *y.shape[1:])

        def value(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return self._value(w, buffers, x, y)

        g, f = vmap(grad_and_value(value), in_dims=(None, 0, 0))(w.detach(), x, y)
        return f, g
