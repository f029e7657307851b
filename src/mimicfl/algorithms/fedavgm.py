"""FedAvgM: FedAvg with momentum at the server, a mean over rounds as well as over clients (Hsu, Qi and Brown, 2019)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import UsageError, fading
from .base import State, Step, Task, register


@dataclass
class MomentumState(State):
    m: Tensor  # [d] the momentum, in steps: a round counts with the rate it had


@register("fedavgm")
@dataclass(frozen=True)
class FedAvgM:
    """m_t = momentum m_{t-1} + eta_t v_t with v_t the mean of the received updates, then w_{t+1} = w_t - (1 - momentum) m_t.

    The factor 1 - momentum makes it go as far in all as FedAvg, so that the same rate suits both; `damped=false` leaves it out, as the
    paper does.
    """

    momentum: float = 0.9
    damped: bool = True
    uploads: ClassVar[int] = 1
    downloads: ClassVar[int] = 1

    def __post_init__(self) -> None:
        fading("momentum", self.momentum)
        if not isinstance(self.damped, bool):
            raise UsageError(f"damped is true or false, got {self.damped!r}")

    def init(self, w: Tensor, num_clients: int) -> MomentumState:
        return MomentumState(w, torch.zeros_like(w))

    def task(self, state: MomentumState, active: Tensor) -> Task:
        return Task()

    def aggregate(self, state: MomentumState, active: Tensor, g: Tensor, step: Step) -> MomentumState:
        state.m = self.momentum * state.m + step.eta * step.mean(g)
        state.w = state.w - ((1 - self.momentum) * state.m if self.damped else state.m)
        return state
