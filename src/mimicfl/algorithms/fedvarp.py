"""FedVARP: the mean of all clients' latest updates, corrected by what changed at the active ones (Jhunjhunwala et al., 2022)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Algorithm, State, Step, memory, register
from .client_memory import ClientMemory


@dataclass
class FedVarpState(State):
    y: ClientMemory  # [N, d] each client's last update; zero until it has been seen
    total: Tensor  # [d] float64: sum of the rows of y, weighted by their share of the population


@register("fedvarp")
@dataclass(frozen=True)
class FedVARP(Algorithm[FedVarpState]):
    """v_t = mean over S_t of (g_i - y_i) + mean over ALL N clients of y_j, then y_i = g_i for i in S_t.

    MIFA's memory with SAGA's step. If all clients are equally likely to participate, v_t is unbiased, as FedAvg's is, but its
    variance comes only from what changed since each client last participated.
    """

    color = "#2166ac"

    def init(self, w: Tensor, num_clients: int) -> FedVarpState:
        return FedVarpState(w, memory(w, num_clients), torch.zeros(w.shape, dtype=torch.float64, device=w.device))

    def aggregate(self, state: FedVarpState, active: Tensor, g: Tensor, step: Step) -> None:
        change = g.double() - state.y[active].double()  # float64: large early updates would otherwise leave their rounding error behind
        v = step.mean(change.to(g.dtype)) + state.total.to(g.dtype)  # v_t, from the memory before this round
        state.total = state.total + step.share.double() @ change
        state.y[active] = g  # y_i <- g_i for i in S_t; absent clients keep theirs
        state.w = state.w - step.eta * v
