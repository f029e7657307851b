"""SCAFFOLD, option II: every local step is steered by control variates (Karimireddy et al., 2020)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..rows import Rows
from .base import State, Step, Task, memory, register


@dataclass
class ScaffoldState(State):
    c: Tensor  # [d] the server's control, always the weighted mean of the rows of c_i
    c_i: Rows  # [N, d] the clients' controls


@register("scaffold")
@dataclass(frozen=True)
class SCAFFOLD:
    """Local steps follow grad f_i(w) - c_i + c; afterwards c_i becomes the mean plain gradient of the round.

    A client sends its update and the change of its control, and receives the model and c: two vectors each way.
    """

    uploads: ClassVar[int] = 2
    downloads: ClassVar[int] = 2

    def init(self, w: Tensor, num_clients: int) -> ScaffoldState:
        return ScaffoldState(w, torch.zeros_like(w), memory(w, num_clients))

    def task(self, state: ScaffoldState, active: Tensor) -> Task:
        return Task(shift=state.c - state.c_i[active])

    def aggregate(self, state: ScaffoldState, active: Tensor, g: Tensor, step: Step) -> ScaffoldState:
        state.w = state.w - step.eta * step.mean(g)
        c_i = state.c_i[active]
        c_plus = c_i - state.c + step.per_step(g)  # option II: c_i - c + (w_t - w_i) / (K eta_L)
        state.c = state.c + step.share @ (c_plus - c_i)  # (|S|/N) times the mean change
        state.c_i[active] = c_plus
        return state
