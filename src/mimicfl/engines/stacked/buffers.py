"""The buffers that training changes, such as the running statistics of BatchNorm, as a part of the lanes."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Packed = dict[str, Tensor]  # one row per client, [m, n], by the name of the type


class ChangingBuffers:
    """Packs buffers of one type into one row per client, so that lanes copy and restore all of them in a few operations."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        held = dict(model.named_buffers())
        self.shapes = {name: held[name].shape for name in names}
        self.kinds: dict[str, list[str]] = {}
        for name in names:
            self.kinds.setdefault(str(held[name].dtype).removeprefix("torch."), []).append(name)

    def packed(self, stacked: Mapping[str, Tensor]) -> Packed:
        """Pack buffers [m, ...] by name."""
        return {
            kind: torch.cat([stacked[name].reshape(len(stacked[name]), -1) for name in names], dim=1) for kind, names in self.kinds.items()
        }

    def of_requests(self, buffers: Sequence[Mapping[str, Tensor]]) -> Packed:
        """Pack the buffers of several models, one row each."""
        return self.packed({name: torch.stack([each[name].reshape(-1) for each in buffers]) for name in self.shapes})

    def stacked(self, packed: Packed) -> dict[str, Tensor]:
        """Return the buffers [m, ...] by name, as views."""
        found: dict[str, Tensor] = {}
        for kind, names in self.kinds.items():
            parts = packed[kind].split([self.shapes[name].numel() for name in names], dim=1)
            found |= {name: part.view(len(part), *self.shapes[name]) for name, part in zip(names, parts, strict=True)}
        return found
