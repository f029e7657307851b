"""The order of the parameters in a lane: convolution weights channels last, small parameters together at the end."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...clients.params import trainable


class Layout:
    """Converts parameter vectors to a lane's layout and back."""

    SMALL = 2**15  # elements; updating fewer costs mostly the launch, so the small parameters share one update

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        parameters = trainable(model)
        self.shapes = [p.shape for p in parameters]
        sizes = [p.numel() for p in parameters]
        flat = torch.arange(sum(sizes)).split(sizes)
        self.large = [i for i, size in enumerate(sizes) if size >= self.SMALL]
        self.small = [i for i, size in enumerate(sizes) if size < self.SMALL]
        order = [*self.large, *self.small]
        begins = itertools.accumulate([sizes[i] for i in order], initial=0)
        self.begin = dict(zip(order, begins, strict=False))
        self.to_lane = torch.cat([self._flat(flat[i].view(self.shapes[i]), i) for i in order]).to(device)
        self.to_flat = torch.argsort(self.to_lane)

    def arrange(self, rows: Tensor) -> Tensor:
        return rows[:, self.to_lane]

    def restore(self, rows: Tensor) -> Tensor:
        return rows[:, self.to_flat]

    def windows(self, rows: Tensor) -> list[Tensor]:
        """Return views of rows [..., d], one per parameter [..., *shape], with convolutions channels last."""
        parts = [rows[..., self.begin[i] : self.begin[i] + shape.numel()] for i, shape in enumerate(self.shapes)]
        return [_window(part, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def pieces(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return gradients [..., *shape] in the lane's order [..., n]: large ones separately, small ones as one."""
        large, small = ([self._flat(gradients[i], i) for i in chosen] for chosen in (self.large, self.small))
        return [*large, *([torch.cat(small, dim=-1)] if small else [])]

    def _flat(self, p: Tensor, i: int) -> Tensor:
        shape = self.shapes[i]
        p = p.movedim(-3, -1) if len(shape) == 4 else p
        return p.reshape(*p.shape[: p.ndim - len(shape)], -1)


def _window(part: Tensor, shape: torch.Size) -> Tensor:
    if not shape:
        return part[..., 0]
    window: Tensor = part.unflatten(-1, (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else shape)
    return window.movedim(-1, -3) if len(shape) == 4 else window
