"""FedStale: fresh updates weighted by 1/p_i, corrected by a share beta of the stale ones (Rodio and Neglia, 2024)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import integer, number, one_of
from .base import Algorithm, State, Step, memory, register
from .client_memory import ClientMemory
from .gaps import inverse_rates, new_gaps


@dataclass
class FedStaleState(State):
    y: ClientMemory  # [N, d] each client's last update; zero until it has been seen
    total: Tensor  # [d] float64: sum of the rows of y, weighted by their share of the population
    gap: Tensor  # [N] the estimate of 1/p_i, see `gaps`
    counted: Tensor  # [N]
    since: Tensor  # [N]


@register("fedstale")
@dataclass(frozen=True)
class FedStale(Algorithm[FedStaleState]):
    """v_t = sum over S_t of g_i / (N p_i) + beta (mean over ALL N of y_j - sum over S_t of y_i / (N p_i)), then y_i = g_i for i in S_t.

    beta = 0 weights fresh updates only, beta = 1 is FedVARP with unequal participation rates. `p="estimated"` takes FedAU's estimate of
    1/p_i, with its `cutoff`; `p="known"` takes the true rates of the availability pattern.
    """

    beta: float = 0.5
    p: str = "estimated"
    cutoff: int = 50
    color = "#882255"

    def __post_init__(self) -> None:
        number("beta", self.beta, low=0, high=1)
        one_of("p", self.p, ["estimated", "known"])
        integer("cutoff", self.cutoff)

    @property
    def needs_participation_rates(self) -> bool:  # type: ignore[override]
        return self.p == "known"

    def init(self, w: Tensor, num_clients: int) -> FedStaleState:
        total = torch.zeros(w.shape, dtype=torch.float64, device=w.device)
        return FedStaleState(w, memory(w, num_clients), total, *new_gaps(num_clients))

    def aggregate(self, state: FedStaleState, active: Tensor, g: Tensor, step: Step) -> None:
        y = state.y[active]
        known = step.participation_rates if self.p == "known" else None
        inverse = inverse_rates(state, active, step, self.cutoff) if known is None else 1 / known  # 1 / p_i
        v = (step.share * inverse.to(g.dtype)) @ (g - self.beta * y) + self.beta * state.total.to(g.dtype)
        state.total = state.total + step.share.double() @ (g.double() - y.double())
        state.y[active] = g
        state.w = state.w - step.eta * v
