"""FedAU: clients that participate rarely get a larger weight, the mean gap between their rounds (Wang and Ji, 2024)."""

from dataclasses import dataclass

from torch import Tensor

from ..errors import integer
from .base import Algorithm, State, Step, register
from .gaps import inverse_rates, new_gaps


@dataclass
class FedAuState(State):
    gap: Tensor  # [N] float64: omega_i, the mean of the gaps counted so far; 1 before the first
    counted: Tensor  # [N] the number of gaps counted
    since: Tensor  # [N] the round in which the last gap ended; -1 before the first


@register("fedau")
@dataclass(frozen=True)
class FedAU(Algorithm[FedAuState]):
    """w_{t+1} = w_t - eta_t sum over S_t of omega_i g_i / N, with omega_i the mean gap between the rounds before t in which i was active.

    omega_i estimates 1 / p_i, so all clients count equally in the long run. State is a few numbers per client, nothing of the model's size.
    After `cutoff` rounds of absence a gap of that length is counted as if the client had participated, so that one long absence does
    not give it an unbounded weight. A forced round (`warm_start=true`) is not counted: it says nothing about availability.
    """

    cutoff: int = 50
    color = "#7570b3"

    def __post_init__(self) -> None:
        integer("cutoff", self.cutoff)

    def init(self, w: Tensor, num_clients: int) -> FedAuState:
        return FedAuState(w, *new_gaps(num_clients))

    def aggregate(self, state: FedAuState, active: Tensor, g: Tensor, step: Step) -> None:
        omega = inverse_rates(state, active, step, self.cutoff)  # from the gaps before this round
        v = (step.share * omega.to(step.share.dtype)) @ g
        state.w = state.w - step.eta * v
