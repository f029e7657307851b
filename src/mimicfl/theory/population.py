"""The losses f_1 ... f_N of all clients as functions of the flat model vector: values, full gradients, curvature.

The model is in evaluation mode and the data is not augmented, so that f_i is a fixed function: dropout, batch statistics of BatchNorm
and random crops are noise of the training, not part of the objective.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ..data.clients import Clients
from ..data.samples import Samples, arguments, as_tensor, mapped, rows

Loss = Callable[[Tensor, Any], Tensor]
AT_ONCE = 4096  # samples per forward pass


class Population:
    """f_i(w) is the mean loss over client i's samples; f = sum of share_i f_i, with uniform shares by default."""

    def __init__(self, model: nn.Module, clients: Clients, loss: Loss, share: Tensor | None = None) -> None:
        self.module = copy.deepcopy(model).to(clients.device).eval()
        self.clients, self.loss = clients, loss
        self.names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        self.shapes = [p.shape for p in self.module.parameters() if p.requires_grad]
        share = torch.ones(len(clients)) if share is None else share
        self.share = (share / share.sum()).to(clients.device, clients.dtype)  # [N]
        convolves = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in self.module.modules())
        self.stacked = not convolves or clients.device.type != "cpu"  # on a CPU, stacked convolutions are twice as slow
        self.passes = 0  # number of passes over all clients' samples, to report the cost

    def gradients(self, w: Tensor, buffers: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return f_i(w) [N] and grad f_i(w) [N, d], in one pass over the data. Clients of equal size are stacked."""
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
        """Return grad f from the clients' gradients."""
        return self.share @ g

    def gradient(self, w: Tensor, rows: np.ndarray, buffers: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean loss over these samples and its gradient [d]."""
        total, g = w.new_zeros(()), torch.zeros_like(w)
        leaf = w.detach().clone().requires_grad_()
        for part, x, y in self._slices(rows):
            value = self._value(leaf, buffers or {}, x, y) * part
            g += torch.autograd.grad(value, leaf)[0]
            total += value.detach()
        return total, g

    def curvature(self, w: Tensor, i: int, v: Tensor, buffers: dict[str, Tensor] | None = None) -> Tensor:
        """Return the product of the Hessian of f_i at w and v, [d]."""
        product = torch.zeros_like(w)
        leaf = w.detach().clone().requires_grad_()
        for part, x, y in self._slices(self.clients.split[i]):
            (g,) = torch.autograd.grad(self._value(leaf, buffers or {}, x, y) * part, leaf, create_graph=True)
            if g.requires_grad:  # otherwise the loss is linear in w
                product += torch.autograd.grad(g @ v, leaf)[0]
        return product

    def _slices(self, rows: np.ndarray) -> Iterator[tuple[float, Samples, Samples]]:
        for part in torch.from_numpy(rows).to(self.clients.device).split(AT_ONCE):
            x, y = self._samples(part)
            yield len(part) / len(rows), x, y

    def _samples(self, index: Tensor) -> tuple[Samples, Samples]:
        return self.clients.inputs(index), rows(self.clients.y, index)

    def _value(self, w: Tensor, buffers: dict[str, Tensor], x: Samples, y: Samples) -> Tensor:
        parts = w.split([shape.numel() for shape in self.shapes])
        given: dict[str, Any] = {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}
        return self.loss(as_tensor(functional_call(self.module, given | buffers, *arguments(x))), y)

    def _stack(self, w: Tensor, buffers: dict[str, Tensor], group: np.ndarray) -> tuple[Tensor, Tensor]:
        """Compute losses and gradients of clients of equal size in one batched call."""
        index = torch.from_numpy(np.stack([self.clients.split[i] for i in group])).to(self.clients.device)
        x, y = (mapped(lambda each: each.unflatten(0, index.shape), part) for part in self._samples(index.reshape(-1)))

        def value(w: Tensor, x: Samples, y: Samples) -> Tensor:
            return self._value(w, buffers, x, y)

        g, f = vmap(grad_and_value(value), in_dims=(None, 0, 0))(w.detach(), x, y)
        return f, g
