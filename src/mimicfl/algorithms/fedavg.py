"""FedAvg: follow the mean of whoever is there (McMahan et al., 2017)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import State, Step, Task, register


@register("fedavg")
@dataclass(frozen=True)
class FedAvg:
    """w_{t+1} = w_t - eta_t v_t with v_t the mean of the received updates.

    With `update="sum"` and `global_lr="local"` this is plain model averaging. Under dropouts v_t is biased towards the
    clients that happen to be present.
    """

    uploads: ClassVar[int] = 1
    downloads: ClassVar[int] = 1

    def init(self, w: Tensor, num_clients: int) -> State:
        return State(w)

    def task(self, state: State, active: Tensor) -> Task:
        return Task()

    def aggregate(self, state: State, active: Tensor, g: Tensor, step: Step) -> State:
        v = step.mean(g)  # v_t
        state.w = state.w - step.eta * v  # w_{t+1}
        return state
