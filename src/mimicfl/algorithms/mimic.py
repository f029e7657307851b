"""MimiC: each active client's update is corrected by what it missed, so that any subset mimics the central update."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import one_of
from .base import Algorithm, State, Step, memory, register
from .client_memory import ClientMemory


@dataclass
class MimicState(State):
    c: ClientMemory  # [N, d] the correction variables


@register("mimic")
@dataclass(frozen=True)
class MimiC(Algorithm[MimicState]):
    """Algorithm 1 of the paper.

    v_t = mean over S_t of (g_i + c_i), then c_i = v_t - g_i for i in S_t: when client i participates again, its correction
    carries the difference between the direction of all clients and its own. A client that never participated has c_i = 0.
    `memory="step"` keeps c_i in units of eta*g, without the paper's rescaling by eta_t / eta_t' (the authors' script).
    """

    memory: str = "gradient"
    color = "#d1495b"
    emphasized = True
    needs_population = False
    conserved = "c"
    paper_rank = 5
    authors = "memory=step"

    def __post_init__(self) -> None:
        one_of("memory", self.memory, ["gradient", "step"])

    @property
    def has_client_form(self) -> bool:
        return self.memory == "gradient" and type(self) is MimiC  # a subclass may do something else

    def init(self, w: Tensor, num_clients: int) -> MimicState:
        return MimicState(w, memory(w, num_clients))

    def aggregate(self, state: MimicState, active: Tensor, g: Tensor, step: Step) -> None:
        eta, g = (1.0, step.eta * g) if self.memory == "step" else (step.eta, g)
        v = torch.empty_like(state.w)
        for part in state.c.columns(len(active)):  # one part, unless [m, d] is large
            corrected = state.c.borrow(active, part).add_(g[:, part])  # g_i + c_i
            v[part] = step.mean(corrected)  # v_t: mean of the corrected updates
            state.c[active, part] = torch.sub(v[part], g[:, part], out=corrected)  # c_i <- v_t - g_i; absent clients keep theirs
        state.w = state.w - eta * v  # w_{t+1} = w_t - eta_t v_t
