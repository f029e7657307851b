"""FedProx: FedAvg whose local models are kept close to the global model (Li et al., 2020)."""

from dataclasses import dataclass

from torch import Tensor

from ..errors import number
from .base import Instructions, State, register
from .fedavg import FedAvg


@register("fedprox")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """Each local step follows grad f_i(w) + mu (w - w_t), the gradient of f_i(w) + mu/2 |w - w_t|^2; mu = 0 is FedAvg."""

    mu: float = 0.01
    color = "#56b4e9"
    dashed = True  # with a small mu it follows FedAvg so closely that a solid line would hide it
    needs_population = False
    mean_suffices = True
    paper_rank = 2

    def __post_init__(self) -> None:
        number("mu", self.mu, low=0)

    def instructions(self, state: State, active: Tensor) -> Instructions:
        return Instructions(mu=self.mu)
