"""FedAvg: follow the mean update of the active clients (McMahan et al., 2017)."""

from dataclasses import dataclass

from torch import Tensor

from .base import Algorithm, State, Step, register


@register("fedavg")
@dataclass(frozen=True)
class FedAvg(Algorithm[State]):
    """w_{t+1} = w_t - eta_t v_t with v_t the mean of the received updates.

    With `update="sum"` and `global_lr="local"` this is plain model averaging. Under dropouts v_t is biased towards the
    clients that happen to be available.
    """

    color = "#e69f00"
    needs_population = False
    mean_suffices = True
    paper_rank = 1

    def aggregate(self, state: State, active: Tensor, g: Tensor, step: Step) -> None:
        v = step.mean(g)  # v_t
        state.w = state.w - step.eta * v  # w_{t+1}
