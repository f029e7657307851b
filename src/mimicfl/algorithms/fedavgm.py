"""FedAvgM: FedAvg with momentum at the server, a mean over rounds as well as over clients (Hsu, Qi and Brown, 2019)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Algorithm, State, Step, register
from .server_optimizers import Momentum


@dataclass
class MomentumState(State):
    m: Tensor  # [d] the momentum, in units of eta*g


@register("fedavgm")
@dataclass(frozen=True)
class FedAvgM(Algorithm[MomentumState]):
    """m_t = momentum m_{t-1} + eta_t v_t with v_t the mean of the received updates, then w_{t+1} = w_t - (1 - momentum) m_t.

    This is FedAvg with the server optimizer `momentum`. The factor 1 - momentum makes the total step as long as FedAvg's, so that the
    same rate suits both; `damped=false` leaves it out, as the paper does.
    """

    momentum: float = 0.9
    damped: bool = True
    color = "#8c6d31"
    needs_population = False
    mean_suffices = True

    def __post_init__(self) -> None:
        Momentum(self.momentum, damped=self.damped)  # refuses what it cannot use

    def init(self, w: Tensor, num_clients: int) -> MomentumState:
        return MomentumState(w, torch.zeros_like(w))

    def aggregate(self, state: MomentumState, active: Tensor, g: Tensor, step: Step) -> None:
        moments = {"m": state.m}
        state.w = state.w - Momentum(self.momentum, damped=self.damped).step(moments, step.eta * step.mean(g))
        state.m = moments["m"]
