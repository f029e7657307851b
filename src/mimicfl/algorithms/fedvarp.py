"""FedVARP: the mean of all clients' latest updates, moved by the news of those who are there (Jhunjhunwala et al., 2022)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..rows import Rows
from .base import State, Step, Task, memory, register


@dataclass
class FedVarpState(State):
    y: Rows  # [N, d] each client's last update; zero until it has been seen
    total: Tensor  # [d] double: the rows of y, weighted by their share of the population, kept up to date row by row


@register("fedvarp")
@dataclass(frozen=True)
class FedVARP:
    """v_t = mean over S_t of (g_i - y_i) + mean over ALL N clients of y_j, then y_i = g_i for i in S_t.

    MIFA's memory with SAGA's step: where everybody is equally likely to be there, v_t is right on average, as FedAvg's is, but
    swings only by what is new since each client was last there.
    """

    uploads: ClassVar[int] = 1
    downloads: ClassVar[int] = 1

    def init(self, w: Tensor, num_clients: int) -> FedVarpState:
        return FedVarpState(w, memory(w, num_clients), torch.zeros(w.shape, dtype=torch.float64, device=w.device))

    def task(self, state: FedVarpState, active: Tensor) -> Task:
        return Task()

    def aggregate(self, state: FedVarpState, active: Tensor, g: Tensor, step: Step) -> FedVarpState:
        news = g.double() - state.y[active].double()  # in double, or large early updates would leave their rounding behind for ever
        v = step.mean(news.to(g.dtype)) + state.total.to(g.dtype)  # v_t, by the memories as they were before this round
        state.total = state.total + step.share.double() @ news
        state.y[active] = g  # y_i <- g_i for i in S_t; absent clients keep theirs
        state.w = state.w - step.eta * v
        return state
