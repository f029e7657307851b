"""FedAWE: each client trains from its own last model, and a longer absence gives its update a larger weight (Xiang et al., 2024)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import number, one_of
from .base import Algorithm, Instructions, State, Step, memory, register
from .client_memory import ClientMemory
from .client_numbers import on_device, on_host


@dataclass
class FedAweState(State):
    x: ClientMemory  # [N, d] the model that each client holds, minus the initial model
    first: Tensor  # [d] the initial model, which clients hold until they participate
    last: Tensor  # [N] the round of each client's last participation; -1 before the first
    total: Tensor  # [d] float64: sum of the rows of x, weighted by their share of the population


@register("fedawe")
@dataclass(frozen=True)
class FedAWE(Algorithm[FedAweState]):
    """x_i+ = x_i - eta_t (t - last_i) g_i for i in S_t, with g_i trained from x_i; then x_i = w_{t+1} = mean over S_t of x_i+ for i in S_t.

    The factor t - last_i multiplies a client's update by the rounds since it last participated; clients keep the model of their last round,
    so models spread like gossip. `clip` bounds the norm of the mean multiplied update (the authors' script: 0.5; 0: no bound).
    `evaluate="mean"` evaluates the mean of all clients' models, as the script does for this method only; `"last"` the model last sent.
    """

    clip: float = 0.0
    evaluate: str = "last"
    color = "#aa4499"
    has_direction = False

    def __post_init__(self) -> None:
        number("clip", self.clip, low=0)
        one_of("evaluate", self.evaluate, ["last", "mean"])

    def init(self, w: Tensor, num_clients: int) -> FedAweState:
        last = torch.full((num_clients,), -1, dtype=torch.int64, device="cpu")  # a GPU would gain nothing
        return FedAweState(w, memory(w, num_clients), w.clone(), last, torch.zeros(w.shape, dtype=torch.float64, device=w.device))

    def instructions(self, state: FedAweState, active: Tensor) -> Instructions:
        return Instructions(start=state.first + state.x[active])

    def aggregate(self, state: FedAweState, active: Tensor, g: Tensor, step: Step) -> None:
        clients, last = on_host(active), state.last.numpy()
        missed = on_device(step.t - last[clients], g.device).to(g.dtype)
        change = step.eta * ((step.weights * missed) @ g)  # eta_g times the mean multiplied update
        if self.clip:
            bound = self.clip * step.eta / step.eta_L  # the script clips before it multiplies by eta_g = eta_t / eta_L
            change = change * (bound / change.norm().double().clamp(min=1e-30)).clamp(max=1.0).to(g.dtype)
        old = state.x[active]
        new = step.mean(old) - change
        state.total = state.total + step.share.double() @ (new.double() - old.double())
        state.x[active] = new.expand(len(active), -1)
        last[clients] = step.t
        state.w = state.first + (state.total.to(g.dtype) if self.evaluate == "mean" else new)
