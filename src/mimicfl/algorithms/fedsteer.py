"""FedSteer: FedGain whose estimates also correct the local steps, as SCAFFOLD's control variates do; SCAFFOLD is a special case."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import number, one_of
from .base import Instructions, Step, register
from .fedgain import FedGain, GainState


@dataclass
class SteerState(GainState):
    K: Tensor  # [] float64: local steps of a client in the last round, on average


@register("fedsteer")
@dataclass(frozen=True)
class FedSteer(FedGain):
    """Local steps follow grad f_i(w) + v - y_i: v is the mean over all clients of their last mean gradients y_j, y_i is the client's own.

    The model moves along v + gain (u - v), with the new v, and u the mean of the active clients' steps; with gain 1, along u. A client not
    seen yet agrees with the mean of the others; with never_seen="zero" it counts as a zero update, and with gain 1 this is SCAFFOLD.
    follow="direction" moves every y_j along with v by the gain, as FedGain does; with one local step it is FedGain.
    The server subtracts the shift from what a client sends and continues as FedGain, in units of one step.

    `horizon` multiplies the shift by a = horizon / (horizon + K): the more local steps, the weaker. Where f_i is curved, K steps with the
    shift s end where grad f_i = -s, and the memory repeats its own shift; with a < 1 it forgets by this factor per visit. 0: a = 1.
    """

    gain: float = 1.0
    follow: str = "innovations"
    never_seen: str = "mean"
    horizon: float = 0.0
    color = "#e7298a"
    downloads = 2
    needs_steps = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("never_seen", self.never_seen, ["mean", "zero"])
        number("horizon", self.horizon, low=0)

    def unseen(self) -> float:
        return 1.0 if self.never_seen == "mean" else 0.0

    def init(self, w: Tensor, num_clients: int) -> SteerState:
        return SteerState(**vars(super().init(w, num_clients)), K=torch.zeros((), dtype=torch.float64, device=w.device))

    def instructions(self, state: SteerState, active: Tensor) -> Instructions:  # type: ignore[override]
        guess = state.k[active, None] * state.v - state.c[active].double()  # the estimate of each client's gradient
        a = self.horizon / (self.horizon + state.K) if self.horizon else 1.0
        return Instructions(shift=(a * (state.v - guess)).to(state.w.dtype))

    def aggregate(self, state: SteerState, active: Tensor, g: Tensor, step: Step) -> None:  # type: ignore[override]
        plain = step.per_step(g) - self.instructions(state, active).shift  # the mean gradient along each client's path
        state.K = step.weights.double() @ step.K.double()
        steps: Any = 1.0 if step.update == "mean" else state.K  # stays on the device
        super().aggregate(state, active, plain, replace(step, eta=step.eta * steps))
