"""FedBuff: the mean of K buffered updates, each discounted by its staleness (Nguyen et al., 2022)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import number
from .base import Algorithm, State, Step, register


@register("fedbuff")
@dataclass(frozen=True)
class FedBuff(Algorithm[State]):
    """w_{t+1} = w_t - eta_t (1/K) sum over the K arrivals of (1 + s_i)^-a g_i, with s_i the server steps since client i got its model.

    For asynchronous runs (`asynchronous=K`). In synchronous ones nothing is stale, and FedBuff equals FedAvg.
    """

    a: float = 0.5
    color = "#666666"
    needs_population = False

    def __post_init__(self) -> None:
        number("a", self.a, low=0, high=100)

    def aggregate(self, state: State, active: Tensor, g: Tensor, step: Step) -> None:
        s = torch.zeros(len(g), device=g.device) if step.staleness is None else step.staleness
        state.w = state.w - step.eta * ((step.weights * (1 + s.to(g.dtype)) ** -self.a) @ g)
