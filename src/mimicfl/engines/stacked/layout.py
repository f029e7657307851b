"""The order of the parameters in a lane: convolution weights channels last, parameters that would break the alignment at the end."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...clients.params import trainable


class Layout:
    """Converts parameter vectors to a lane's layout and back."""

    ALIGNED = 16  # elements; parameters of other sizes come last, so that all others can be read in wide loads

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        parameters = trainable(model)
        self.shapes = [p.shape for p in parameters]
        sizes = [p.numel() for p in parameters]
        flat = torch.arange(sum(sizes)).split(sizes)
        self.order = sorted(range(len(sizes)), key=lambda i: sizes[i] % self.ALIGNED != 0)
        begins = itertools.accumulate([sizes[i] for i in self.order], initial=0)
        self.begin = dict(zip(self.order, begins, strict=False))
        self.to_lane = torch.cat([self._flat(flat[i].view(self.shapes[i]), i) for i in self.order]).to(device)
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
        """Return gradients [..., *shape] as one piece [..., n] per parameter, in the lane's order."""
        return [self._flat(gradients[i], i) for i in self.order]

    def _flat(self, p: Tensor, i: int) -> Tensor:
        shape = self.shapes[i]
        p = p.movedim(-3, -1) if len(shape) == 4 else p
        return p.reshape(*p.shape[: p.ndim - len(shape)], -1)


def _window(part: Tensor, shape: torch.Size) -> Tensor:
    if not shape:
        return part[..., 0]
    window: Tensor = part.unflatten(-1, (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else shape)
    return window.movedim(-1, -3) if len(shape) == 4 else window
