"""One local step of many clients as one function of stacked tensors, traced from any module by `vmap(grad)`."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from ...data.dataset import Data, crop_and_flip
from ...local.losses import Loss, cross_entropy
from ...local.update import shortening
from ..lanes import Lanes
from .rewrite import Stackable


class Stack:
    """A module and a loss, ready to be run by many clients at once."""

    def __init__(self, model: nn.Module, data: Data, loss: Loss, device: torch.device, precision: str) -> None:
        self.module = copy.deepcopy(model).to(device).train()
        self.data, self.loss = data, loss
        self.half = precision == "bf16"
        self.precision = "tf32x3" if precision == "fp32" else "tf32"  # of our convolutions: tf32x3 is float32 in three products
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in trained]
        self.shapes = [p.shape for _, p in trained]
        self.sizes = [p.numel() for _, p in trained]
        self.dtype = trained[0][1].dtype

    def windows(self, w: Tensor) -> list[Tensor]:
        """[m, d] as one view [m, *shape] a parameter."""
        return [part.unflatten(1, shape) if shape else part[:, 0] for part, shape in zip(w.split(self.sizes, 1), self.shapes, strict=True)]

    def _loss(self, params: list[Tensor], x: Tensor, y: Tensor, weights: Tensor, key: Tensor) -> Tensor:
        with Stackable(key, self.precision), torch.autocast(x.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            output = functional_call(self.module, dict(zip(self.names, params, strict=True)), (x,))
        return (each(self.loss, output.to(self.dtype), y) * weights).sum()

    def step(self, lanes: Lanes, m: int, x: Tensor, y: Tensor) -> None:
        """Advance the first m lanes by one local step, in place."""
        now = torch.minimum(lanes.k[:m], lanes.steps[:m] - 1)[:, None]  # lanes that are through repeat their last batch, for nothing
        place = torch.arange(lanes.batch, device=x.device)
        at = now * lanes.batch + place
        rows = lanes.samples[:m].gather(1, at).long()
        count = lanes.sizes[:m].gather(1, now)
        weights = (place < count).to(self.dtype) / count
        images = x[rows]
        if lanes.moves is not None:
            moves = lanes.moves[:m].gather(1, at[..., None].expand(-1, -1, 3)).long()
            images = crop_and_flip(images.flatten(0, 1), moves.flatten(0, 1)).view_as(images)
        inputs = self.data.inputs(images.flatten(0, 1), self.dtype).unflatten(0, (m, lanes.batch))
        w = lanes.w[:m]
        gradients, value = vmap(grad_and_value(self._loss))(self.windows(w), inputs, y[rows], weights, lanes.keys[:m] + now[:, 0])
        h = torch.cat([g.flatten(1) if g.ndim > 1 else g[:, None] for g in gradients], dim=1)
        if lanes.clip is not None:
            h = h * shortening(h.norm(dim=1), lanes.clip[:m])[:, None]
        if lanes.shift is not None:
            h = h + lanes.shift[:m]
        if lanes.start is not None:
            h = h + lanes.mu[:m, None] * (w - lanes.start[:m])
        going = (lanes.k[:m] < lanes.steps[:m])[:, None]
        if lanes.u is not None and lanes.momentum is not None:
            h = lanes.momentum[:m, None] * lanes.u[:m] + h
            lanes.u[:m] = h  # also where a lane is through: nobody reads it again
        h = torch.where(going, h, 0.0)
        lanes.g[:m] += h
        w -= lanes.eta[:m, None] * h
        lanes.total[:m] += torch.where(going[:, 0], value, 0.0)
        lanes.k[:m] += 1

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """Outputs [r, n, ...] of r models [r, d] in evaluation mode for the same stored samples."""
        inputs = self.data.inputs(x, self.dtype)
        key = torch.zeros((), dtype=torch.long, device=x.device)

        def one(params: list[Tensor]) -> Any:
            with Stackable(key, self.precision):
                return functional_call(self.module, dict(zip(self.names, params, strict=True)), (inputs,))

        self.module.eval()
        try:
            return vmap(one)(self.windows(w))  # type: ignore[no-any-return]
        finally:
            self.module.train()


def each(loss: Loss, output: Tensor, target: Tensor) -> Tensor:
    """The loss of every sample, [B], whose mean is the loss of the batch."""
    if loss is cross_entropy or loss is F.cross_entropy:
        single = F.cross_entropy(output, target, reduction="none")
        return single.flatten(1).mean(dim=1) if single.ndim > 1 else single
    one: Callable[[Tensor, Tensor], Tensor] = lambda o, t: loss(o[None], t[None])  # noqa: E731
    return vmap(one)(output, target)
