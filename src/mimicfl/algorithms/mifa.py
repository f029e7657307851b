"""MIFA: an absent client is represented by the last update it sent (Gu et al., 2021)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import one_of
from ..rows import Rows
from .base import State, Step, Task, memory, register


@dataclass
class MifaState(State):
    G: Rows  # [N, d] each client's last update
    total: Tensor  # [d] double: the rows of G, weighted by their share of the population, kept up to date row by row
    seen: Tensor  # [N] bool
    weight: Tensor  # [] double, the share of the population that has been seen


@register("mifa")
@dataclass(frozen=True)
class MIFA:
    """w_{t+1} = w_t - eta_t mean over ALL N clients of their latest update G_i.

    `never_seen` says what stands in for a client that has not answered yet: `zero` a zero update, `exclude` nobody (the
    mean is over those seen), `wait` the model rests until everybody has answered once.
    `memory="step"` keeps eta*g instead of g, without rescaling (the authors' script of the MimiC paper).
    """

    never_seen: str = "zero"
    memory: str = "gradient"
    uploads: ClassVar[int] = 1
    downloads: ClassVar[int] = 1

    def __post_init__(self) -> None:
        one_of("never_seen", self.never_seen, ["zero", "exclude", "wait"])
        one_of("memory", self.memory, ["gradient", "step"])

    def init(self, w: Tensor, num_clients: int) -> MifaState:
        seen = torch.zeros(num_clients, dtype=torch.bool, device=w.device)
        total, weight = (torch.zeros(shape, dtype=torch.float64, device=w.device) for shape in (w.shape, ()))
        return MifaState(w, memory(w, num_clients), total, seen, weight)

    def task(self, state: MifaState, active: Tensor) -> Task:
        return Task()

    def aggregate(self, state: MifaState, active: Tensor, g: Tensor, step: Step) -> MifaState:
        eta, g = (1.0, step.eta * g) if self.memory == "step" else (step.eta, g)
        change = g.double() - state.G[active].double()  # in double, or large early updates would leave their rounding behind for ever
        state.total = state.total + step.share.double() @ change  # sum over N of share_i G_i
        state.G[active] = g  # G_i <- g_i for i in S_t; absent clients keep theirs
        state.weight = state.weight + (step.share * ~state.seen[active]).sum(dtype=torch.float64)
        state.seen[active] = True
        if self.never_seen == "wait" and not state.seen.all():
            return state
        v = state.total / state.weight if self.never_seen == "exclude" else state.total
        state.w = state.w - eta * v.to(g.dtype)
        return state
