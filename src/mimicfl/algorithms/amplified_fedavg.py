"""Amplified FedAvg: after every period of rounds, the progress of the period is multiplied (Wang and Ji, 2022).

A period long enough for every client to participate makes the sum of its steps nearly unbiased; small steps keep the model nearly in place
during the period, and amplification compensates for them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import integer, number
from .base import Algorithm, State, Step, register


@dataclass
class AmplifiedState(State):
    anchor: Tensor  # [d] the model at the start of the period
    periods: Tensor  # [] how many periods have ended; in host memory, because the host reads it every round


def no_periods() -> Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")


def amplify(state: AmplifiedState, step: Step, period: int, gamma: float) -> bool:
    """Amplify if a period has ended; one that ends in an empty round is amplified in the next round with active clients."""
    if (step.t + 1) // period == int(state.periods):
        return False
    state.w = state.anchor + gamma * (state.w - state.anchor)
    state.anchor = state.w.clone()
    state.periods = torch.full_like(state.periods, (step.t + 1) // period)
    return True


@dataclass(frozen=True)
class Amplified:
    period: int = 20
    gamma: float = 2.0

    def __post_init__(self) -> None:
        integer("period", self.period)
        number("gamma", self.gamma, low=1)


@register("amplified-fedavg")
@dataclass(frozen=True)
class AmplifiedFedAvg(Amplified, Algorithm[AmplifiedState]):
    """FedAvg; after every `period` rounds, w = anchor + gamma (w - anchor), with anchor the model at the start of the period."""

    title = "amplified FedAvg"
    color = "#ddcc77"
    has_direction = False
    mean_suffices = True

    def init(self, w: Tensor, num_clients: int) -> AmplifiedState:
        return AmplifiedState(w, w.clone(), no_periods())

    def aggregate(self, state: AmplifiedState, active: Tensor, g: Tensor, step: Step) -> None:
        state.w = state.w - step.eta * step.mean(g)
        amplify(state, step, self.period, self.gamma)
