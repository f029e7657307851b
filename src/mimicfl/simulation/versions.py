"""The models that clients of an asynchronous run started from, and the requests to clients that started from different ones."""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from ..algorithms.server import Server
from ..algorithms.updates import Request, Start
from ..errors import UsageError
from ..participation.asynchronous import Arrivals


class Versions:
    """Version t is the model before server step t. Kept are those that a client may still be training from."""

    def __init__(self, server: Server, arrivals: Arrivals) -> None:
        self.server, self.arrivals = server, arrivals
        self.held: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}  # weights and buffers
        self._hold(0)

    def _hold(self, version: int) -> None:
        # Copies: a custom `aggregate` may change state.w in place.
        buffers = {name: value.detach().clone() for name, value in self.server.buffers.items()}
        self.held[version] = (self.server.w.detach().clone(), buffers)

    def stepped(self, t: int) -> None:
        """After server step t: keep the new model, and drop those that no client trains from any more."""
        self._hold(t + 1)
        self.held = {version: held for version, held in self.held.items() if version >= self.arrivals.oldest[t]}

    def check(self, request: Request) -> None:
        """Refuse instructions that an asynchronous run cannot follow."""
        if request.instructions.start is not None or isinstance(request.instructions.shift, Tensor):
            name = type(self.server.algorithm).__name__
            raise UsageError(f"{name} cannot train asynchronously: what a client computes depends on the server's state when it starts")

    def applied_to(self, request: Request, versions: np.ndarray) -> Request:
        """The request with what its clients started from: model, buffers and learning rate of their versions."""
        self.check(request)
        stale = request.t - versions
        if not stale.any():
            return dataclasses.replace(request, staleness=stale)
        # Every server step has the same number of arrivals, so a version's learning rate is that of its server step.
        starts = [Start(*self.held[v], self.server.local_lr(v, len(versions))) for v in versions.tolist()]
        given = dataclasses.replace(request.instructions, start=torch.stack([start.w for start in starts]))
        return dataclasses.replace(request, instructions=given, staleness=stale, starts=starts)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint must hold."""
        found = {f"start.{version}": w for version, (w, _) in self.held.items()}
        return found | {f"start.{version}.{name}": b for version, (_, buffers) in self.held.items() for name, b in buffers.items()}

    def restore(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Continue from what `tensors` returned."""
        mine = {name.removeprefix("start."): value.to(device) for name, value in tensors.items() if name.startswith("start.")}
        self.held = {int(name): (w, {}) for name, w in mine.items() if name.isdecimal()}
        for name, value in mine.items():
            version, _, buffer = name.partition(".")
            if buffer:
                self.held[int(version)][1][buffer] = value
