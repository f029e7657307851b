"""FedAU: who is rarely there counts for more, by the mean gap between its visits (Wang and Ji, 2024)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import whole
from .base import State, Step, Task, register


@dataclass
class FedAuState(State):
    gap: Tensor  # [N] double: omega_i, the mean of the gaps counted so far; 1 before the first
    counted: Tensor  # [N] how many gaps that is
    since: Tensor  # [N] the round that ended the last of them; -1 before the first


@register("fedau")
@dataclass(frozen=True)
class FedAU:
    """w_{t+1} = w_t - eta_t sum over S_t of omega_i g_i / N, with omega_i the mean gap between the rounds client i was there before t.

    A few numbers a client, nothing the size of the model: omega_i estimates 1 / p_i, so that everybody counts alike in the long run.
    A client away for `cutoff` rounds has a gap of that length counted as if it had been there, so that one long absence does not make
    it louder without bound.
    """

    cutoff: int = 50
    uploads: ClassVar[int] = 1
    downloads: ClassVar[int] = 1

    def __post_init__(self) -> None:
        whole("cutoff", self.cutoff)

    def init(self, w: Tensor, num_clients: int) -> FedAuState:
        gap = torch.ones(num_clients, dtype=torch.float64, device=w.device)
        counted = torch.zeros(num_clients, dtype=torch.int64, device=w.device)
        return FedAuState(w, gap, counted, counted - 1)

    def task(self, state: FedAuState, active: Tensor) -> Task:
        return Task()

    def aggregate(self, state: FedAuState, active: Tensor, g: Tensor, step: Step) -> FedAuState:
        # The gaps cut off while a client was away are counted now that it is back: before that nobody asks for its weight.
        cuts = (step.t - 1 - state.since[active]) // self.cutoff
        self._count(state, active, cuts, cuts * self.cutoff)
        v = (step.share * state.gap[active].to(step.share.dtype)) @ g  # by the gaps before this round, which says nothing of the weights
        self._count(state, active, torch.ones_like(cuts), step.t - state.since[active])
        state.w = state.w - step.eta * v
        return state

    def _count(self, state: FedAuState, active: Tensor, more: Tensor, length: Tensor) -> None:
        """So many more gaps, of this length in all."""
        counted = state.counted[active] + more
        mean = (state.gap[active] * state.counted[active] + length) / counted.clamp(min=1)
        state.gap[active] = torch.where(counted > 0, mean, 1.0)
        state.counted[active] = counted
        state.since[active] += length
