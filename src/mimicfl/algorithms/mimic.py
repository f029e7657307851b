"""MimiC: each active client's update is corrected by what it missed, so that any subset mimics the central update."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..errors import one_of
from ..rows import Rows
from .base import State, Step, Task, memory, register


@dataclass
class MimicState(State):
    c: Rows  # [N, d] the correction variables


@register("mimic")
@dataclass(frozen=True)
class MimiC:
    """Algorithm 1 of the paper.

    v_t = mean over S_t of (g_i + c_i), then c_i = v_t - g_i for i in S_t: next time client i comes, it carries with it the
    difference between what everybody wanted and what it wanted itself. A client never seen has c_i = 0.
    `memory="step"` keeps c_i in units of eta*g, without the paper's rescaling by eta_t / eta_t' (the authors' script).
    """

    memory: str = "gradient"
    uploads: ClassVar[int] = 1
    downloads: ClassVar[int] = 1

    def __post_init__(self) -> None:
        one_of("memory", self.memory, ["gradient", "step"])

    def init(self, w: Tensor, num_clients: int) -> MimicState:
        return MimicState(w, memory(w, num_clients))

    def task(self, state: MimicState, active: Tensor) -> Task:
        return Task()

    def aggregate(self, state: MimicState, active: Tensor, g: Tensor, step: Step) -> MimicState:
        eta, g = (1.0, step.eta * g) if self.memory == "step" else (step.eta, g)
        v = step.mean(g + state.c[active])  # v_t: mean of the corrected updates
        state.c[active] = v - g  # c_i <- v_t - g_i for i in S_t; absent clients keep theirs
        state.w = state.w - eta * v  # w_{t+1} = w_t - eta_t v_t
        return state
