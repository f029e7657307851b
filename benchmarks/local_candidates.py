"""Candidates for one default with few and with many local steps: where clients start, and how strong the shift of their steps is."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import mimicfl as mf
from mimicfl.algorithms.base import Step, Task, register
from mimicfl.algorithms.fedsteer import SteerState
from mimicfl.errors import number


@dataclass
class CentredState(SteerState):
    T: Tensor  # [] float64: local rate times local steps in the last round


@register("centred")
@dataclass(frozen=True)
class Centred(mf.FedSteer):
    """Client i starts at w_t + offset T (y_i - v), T = eta_L K, so that its path is centred where the path of the model will be.

    `share` of FedSteer's shift acts in the local steps besides. offset=0.5,share=0: only the start differs from FedVARP or FedGain.
    """

    offset: float = 0.5
    share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        number("offset", self.offset, low=0)
        number("share", self.share, low=0, high=1)

    def init(self, w: Tensor, num_clients: int) -> CentredState:
        return CentredState(**vars(super().init(w, num_clients)), T=torch.zeros((), dtype=torch.float64, device=w.device))

    def task(self, state: Any, active: Tensor) -> Task:
        shift = super().task(state, active).shift
        x = state.x if self.window else state.w
        return Task(shift=self.share * shift, start=x - (self.offset * state.T).to(x.dtype) * shift)

    def aggregate(self, state: Any, active: Tensor, g: Tensor, step: Step) -> None:
        super().aggregate(state, active, g, step)  # FedSteer reads the same task
        state.T = state.K * step.eta_L


@dataclass
class ClippedState(SteerState):
    r: Tensor  # [N] float64: norm of each client's last mean gradient; 0 before the first


@register("clipped")
@dataclass(frozen=True)
class Clipped(mf.FedSteer):
    """FedSteer whose shifts, and with `memory` also the mean gradients received, have at most so many times the median norm of the memories."""

    bound: float = 1.0
    memory: float = 0.0  # 0: no bound

    def init(self, w: Tensor, num_clients: int) -> ClippedState:
        return ClippedState(**vars(super().init(w, num_clients)), r=torch.zeros(num_clients, dtype=torch.float64, device=w.device))

    def typical(self, state: Any) -> Tensor:
        seen = state.r[state.r > 0]
        return seen.median() if len(seen) else state.r.new_zeros(())

    def task(self, state: Any, active: Tensor) -> Task:
        task = super().task(state, active)
        shift: Any = task.shift
        if not self.bound:
            return task
        factor = self.bound * self.typical(state) / shift.norm(dim=1).double().clamp(min=1e-30)
        return replace(task, shift=shift * factor.clamp(max=1.0).to(shift.dtype)[:, None])

    def aggregate(self, state: Any, active: Tensor, g: Tensor, step: Step) -> None:
        shift: Any = self.task(state, active).shift
        r = state.r.clone()  # the old norms stay until FedSteer has asked for the task once more
        r[active] = (step.per_step(g) - shift).norm(dim=1).double()
        if self.memory:
            factor = (self.memory * r[r > 0].median() / r[active].clamp(min=1e-30)).clamp(max=1.0)
            r[active] *= factor
            K = 1 if step.update == "mean" else step.K[:, None].to(g.dtype)
            g = factor.to(g.dtype)[:, None] * (g - K * shift) + K * shift
        super().aggregate(state, active, g, step)
        state.r = r


@register("guarded")
@dataclass(frozen=True)
class Guarded(mf.FedSteer):
    """FedSteer that takes at most `guard` times the median norm from any client, and does not shift a client that exceeded this last time."""

    guard: float = 3.0
    cut: int = 1

    def init(self, w: Tensor, num_clients: int) -> ClippedState:
        return ClippedState(**vars(super().init(w, num_clients)), r=torch.zeros(num_clients, dtype=torch.float64, device=w.device))

    def factor(self, r: Tensor, active: Tensor) -> Tensor:
        """By how much the last mean gradient of each active client exceeds the bound, [m], at most 1."""
        typical = r[r > 0].median() if bool((r > 0).any()) else r.new_zeros(())
        return torch.where(r[active] > 0, (self.guard * typical / r[active].clamp(min=1e-30)).clamp(max=1.0), 1.0)

    def task(self, state: Any, active: Tensor) -> Task:
        task = super().task(state, active)
        kept = self.factor(state.r, active)
        kept = (kept == 1).to(state.w.dtype) if self.cut else torch.ones_like(kept).to(state.w.dtype)
        return replace(task, shift=task.shift * kept[:, None])

    def aggregate(self, state: Any, active: Tensor, g: Tensor, step: Step) -> None:
        shift: Any = self.task(state, active).shift
        r = state.r.clone()  # the old norms stay until FedSteer has asked for the task once more
        r[active] = (step.per_step(g) - shift).norm(dim=1).double()
        K = 1 if step.update == "mean" else step.K[:, None].to(g.dtype)
        g = self.factor(r, active).to(g.dtype)[:, None] * (g - K * shift) + K * shift
        super().aggregate(state, active, g, step)
        state.r = r
