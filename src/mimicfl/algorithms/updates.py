"""What the server asks of clients, and what they send back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .base import Instructions


@dataclass(frozen=True)
class Start:
    """What a client of an asynchronous run started from, which may be older than the server's model."""

    w: Tensor  # [d]
    buffers: dict[str, Tensor]
    eta_L: float


@dataclass(frozen=True)
class Request:
    """What the server asks of the active clients in one round."""

    t: int
    active: np.ndarray  # [m] sorted client numbers
    share: Tensor  # [m] their weights among all N clients
    w: Tensor  # [d] the global model w_t
    buffers: dict[str, Tensor]
    instructions: Instructions
    eta_L: float
    eta: float  # eta_t, which only the server uses
    staleness: np.ndarray | None = field(default=None, kw_only=True)  # [m] server steps since the clients got their models
    starts: Sequence[Start] | None = field(default=None, kw_only=True)  # [m] of clients with different starts; None: all have w
    mean_suffices: bool = field(default=False, kw_only=True)  # the server needs only the mean of g over the clients, weighted by share
    numbers: Tensor | None = field(default=None, kw_only=True)  # [m] `active` on the device, if it is there already


@dataclass(frozen=True)
class ClientUpdates:
    """What the active clients send back; rows follow `Request.active`.

    Where `Request.mean_suffices`, an engine may put the clients into groups and return the means over the groups, weighted by the
    clients' shares: g and the buffers then have one row per group, and `group` says which row is whose.
    """

    g: Tensor  # [m, d] sum of the local steps, in gradient units
    K: Tensor  # [m] local steps taken
    loss: Tensor  # [m] mean training loss of the local steps
    buffers: dict[str, Tensor] = field(default_factory=dict)  # [m, ...]
    sent: dict[str, Tensor] = field(default_factory=dict)  # [m, d] each, what `Instructions.send` asked for
    finite: bool = False  # g is known to be finite, and need not be checked
    group: Tensor | None = None  # [m] the row of g that holds the mean over a client's group; None: g has a row per client

    @classmethod
    def cat(cls, parts: "Sequence[ClientUpdates]") -> "ClientUpdates":
        """The updates of several groups of clients as one."""
        if len(parts) == 1:
            return parts[0]
        g, K, loss = (torch.cat([getattr(part, name) for part in parts]) for name in ("g", "K", "loss"))
        buffers, sent = (
            {name: torch.cat([getattr(part, field)[name] for part in parts]) for name in getattr(parts[0], field)}
            for field in ("buffers", "sent")
        )
        return cls(g, K, loss, buffers, sent)

    def summed(self, weights: Tensor) -> Tensor:
        """The clients' weights [m] as weights of the rows of g."""
        return weights if self.group is None else weights.new_zeros(len(self.g)).index_add(0, self.group, weights)
