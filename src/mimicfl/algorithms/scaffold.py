"""SCAFFOLD, option II: every local step is steered by control variates (Karimireddy et al., 2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import integer
from .base import Algorithm, Instructions, State, Step, memory, register
from .client_memory import ClientMemory


@dataclass
class ScaffoldState(State):
    c: Tensor  # [d] the server's control, always the weighted mean of the rows of c_i
    c_i: ClientMemory  # [N, d] the clients' controls


@register("scaffold")
@dataclass(frozen=True)
class SCAFFOLD(Algorithm[ScaffoldState]):
    """Local steps follow grad f_i(w) - c_i + c; afterwards c_i becomes the mean plain gradient of the round.

    A client receives the model and c and sends its update, from which the server computes the new control: one vector up, two down. In
    the paper it also sends the change of its control; `uploads=2` counts that vector, which changes the budget and not the model.
    """

    uploads: int = 1  # type: ignore[misc]
    color = "#009e73"
    downloads = 2
    needs_steps = True
    paper_rank = 3

    def __post_init__(self) -> None:
        integer("uploads", self.uploads, high=2)

    def init(self, w: Tensor, num_clients: int) -> ScaffoldState:
        return ScaffoldState(w, torch.zeros_like(w), memory(w, num_clients))

    def instructions(self, state: ScaffoldState, active: Tensor) -> Instructions:
        return Instructions(shift=state.c - state.c_i[active])

    def aggregate(self, state: ScaffoldState, active: Tensor, g: Tensor, step: Step) -> None:
        state.w = state.w - step.eta * step.mean(g)
        c_i = state.c_i[active]
        c_plus = c_i - state.c + step.per_step(g)  # option II: c_i - c + (w_t - w_i) / (K eta_L)
        state.c = state.c + step.share @ (c_plus - c_i)  # (|S|/N) times the mean change
        state.c_i[active] = c_plus
