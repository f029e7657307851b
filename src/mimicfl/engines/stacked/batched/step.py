"""One local step of many clients as a function of stacked tensors, derived from any module with `vmap(grad)`."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn import functional as F

from ....clients.losses import Loss, cross_entropy
from ....data.augment import crop_and_flip
from ....data.dataset import Data
from ....data.samples import Samples, mapped, rows
from ....tasks.base import LearningTask, ratio
from ..buffers import ChangingBuffers, Packed
from ..graphs import independent_of_values
from ..lanes import Lanes
from ..layout import Layout
from ..module import call_with, stackable_copy
from ..update import keep_buffers, update_pieces
from .rewrite import Stackable


class Stack:
    """A module and a loss, stacked over clients. With a layout, vectors are stored in its order; `wide`: images are channels last."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        loss: Loss,
        device: torch.device,
        precision: str,
        buffers: ChangingBuffers,
        layout: Layout | None = None,
        wide: bool = False,
    ) -> None:
        self.half = precision == "bf16" and layout is not None
        self.module = stackable_copy(copy.deepcopy(model).to(torch.bfloat16) if self.half else model, device).train()
        self.data, self.loss, self.buffers, self.layout, self.wide = data, loss, buffers, layout, wide
        self.precision = "tf32x3" if precision == "fp32" else "tf32"  # of our convolutions: tf32x3 is float32 in three products
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in trained]
        self.shapes = [p.shape for _, p in trained]
        self.sizes = [p.numel() for _, p in trained]
        self.dtype = next(p for p in model.parameters() if p.requires_grad).dtype  # of vectors and losses

    def windows(self, w: Tensor) -> list[Tensor]:
        """Split [m, d] into one view [m, *shape] per parameter."""
        if self.layout is not None:
            return self.layout.windows(w)
        return [part.unflatten(1, shape) if shape else part[:, 0] for part, shape in zip(w.split(self.sizes, 1), self.shapes, strict=True)]

    def _loss(
        self, params: list[Tensor], buffers: dict[str, Tensor], x: Samples, y: Samples, weights: Tensor, key: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch and the buffers after it."""
        with Stackable(key, self.precision, weights, self.wide):
            output, buffers = self._outputs(params, buffers, x)
        return weighted(self.loss, output.to(self.dtype), y, weights), buffers

    def _outputs(self, params: list[Tensor], buffers: dict[str, Tensor], x: Samples) -> tuple[Tensor, dict[str, Tensor]]:
        return call_with(self.module, dict(zip(self.names, params, strict=True)), buffers, x)

    def step(self, lanes: Lanes, m: int, x: Samples, y: Samples) -> None:
        """Advance the first m lanes by one local step, in place."""
        self.update(lanes, m, *self.pieces(lanes, m, x, y))

    def pieces(self, lanes: Lanes, m: int, x: Samples, y: Samples) -> tuple[list[Tensor], Tensor]:
        """The first half of a step: the gradients of the first m lanes in the order of their vectors, and the losses."""
        gradients, value = self._gradients(lanes, m, x, y)
        if self.layout is None:
            return [g.flatten(1) if g.ndim > 1 else g[:, None] for g in gradients], value
        return self.layout.pieces(gradients), value

    def update(self, lanes: Lanes, m: int, pieces: list[Tensor], value: Tensor) -> None:
        """The second half: apply the gradients, in place."""
        going = lanes.k[:m] < lanes.steps[:m]
        update_pieces(lanes, slice(0, m), pieces)
        lanes.total[:m] += torch.where(going, value, 0.0)
        lanes.k[:m] += 1

    def _gradients(self, lanes: Lanes, m: int, x: Samples, y: Samples) -> tuple[list[Tensor], Tensor]:
        """Return the gradients of the first m lanes on their next batch, one tensor per parameter, and the losses [m]."""
        now = torch.minimum(lanes.k[:m], lanes.steps[:m] - 1)[:, None]  # finished lanes repeat their last batch, without effect
        place = torch.arange(lanes.batch, device=lanes.w.device)
        at = now * lanes.batch + place
        chosen = lanes.samples[:m].gather(1, at).long()
        count = lanes.sizes[:m].gather(1, now)
        weights = (place < count).to(self.dtype) / count
        batch = rows(x, chosen)
        if lanes.moves is not None and isinstance(batch, Tensor):
            moves = lanes.moves[:m].gather(1, at[..., None].expand(-1, -1, 3)).long()
            batch = crop_and_flip(batch.flatten(0, 1), moves.flatten(0, 1)).view_as(batch)
        flat = self.data.inputs(mapped(lambda each: each.flatten(0, 1), batch), self.dtype)
        inputs, targets = mapped(lambda each: self._rounded(each.unflatten(0, (m, lanes.batch))), flat), rows(y, chosen)
        w = (lanes.w if lanes.half is None else lanes.half)[:m]
        before = {kind: rows[:m] for kind, rows in lanes.buffers.items()}
        given = (self.windows(w), self.buffers.stacked(before), inputs, targets, weights, lanes.keys[:m] + now[:, 0])
        gradients, (value, after) = vmap(grad_and_value(self._loss, has_aux=True))(*given)
        keep_buffers(before, self.buffers.packed(after), lanes.k[:m] < lanes.steps[:m])
        return gradients, value

    def _rounded(self, x: Tensor) -> Tensor:
        """An input in the precision of the model."""
        return x.to(torch.bfloat16) if self.half and x.is_floating_point() else x

    def outputs(self, w: Tensor, buffers: Packed, x: Samples) -> Tensor:
        """Return the outputs [r, n, ...] of r models [r, d], in the order of the model, in evaluation mode on the same stored samples."""
        w = w if self.layout is None else self.layout.arrange(w)
        inputs = self.data.inputs(x, self.dtype)
        key = torch.zeros((), dtype=torch.long, device=w.device)

        def one(params: list[Tensor], buffers: dict[str, Tensor]) -> Any:
            with Stackable(key, self.precision):
                return self._outputs(params, buffers, inputs)[0]

        self.module.eval()
        try:
            return independent_of_values(lambda: vmap(one)(self.windows(w), self.buffers.stacked(buffers)))  # type: ignore[no-any-return]
        finally:
            self.module.train()


def weighted(loss: Loss, output: Tensor, target: Samples, weights: Tensor) -> Tensor:
    """The loss of a padded batch; the weights of its samples sum to 1, those of the padding are 0."""
    if isinstance(loss, LearningTask):
        total, weight = loss.sums(output, target)
        here = (weights > 0).to(total.dtype)
        return ratio(total * here, weight * here)
    return (each(loss, output, target) * weights).sum()


def each(loss: Loss, output: Tensor, target: Samples) -> Tensor:
    """Return the loss of every sample, [B]; its mean is the loss of the batch."""
    if isinstance(target, Tensor) and (loss is cross_entropy or loss is F.cross_entropy):
        single = F.cross_entropy(output, target, reduction="none")
        return single.flatten(1).mean(dim=1) if single.ndim > 1 else single
    one: Callable[[Tensor, Samples], Tensor] = lambda o, t: loss(o[None], mapped(lambda each: each[None], t))  # noqa: E731
    return vmap(one)(output, target)
