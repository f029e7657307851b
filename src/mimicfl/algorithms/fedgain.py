"""FedGain: estimate absent clients by their last update plus a gain times the others' change; 0 is MIFA, 1 is MimiC or FedVARP."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import number, one_of
from .base import Algorithm, State, Step, memory, register
from .client_memory import ClientMemory


@dataclass
class GainState(State):
    c: ClientMemory  # [N, d] gain * v - g_i of each client's last round
    k: Tensor  # [N] float64: the gain of each client; 1 until it has participated
    k_mean: Tensor  # [] float64: mean of k over all N clients
    v: Tensor  # [d] float64: the last direction; with follow="innovations", the mean of all clients' last updates


@register("fedgain")
@dataclass(frozen=True)
class FedGain(Algorithm[GainState]):
    """v_t is the mean over ALL N clients of g_i for i in S_t, and of the estimate y_j + gain (v_t - u_j) for the absent ones.

    y_j is the update that client j sent last, u_j the direction of that round. With c_j = gain u_j - y_j the solution for v_t is v_t = ((1
    - k) v_{t-1} + s mean over S_t of (g_i + c_i)) / (1 - k + s k) with s = |S_t| / N and k = gain, as soon as all clients have been seen. A
    client not seen yet is assumed to agree with the mean of the others (k_j = 1). Gain 1 is MimiC; gain 0 is MIFA (never_seen=exclude).
    follow="innovations" estimates y_j + gain (mean over S_t of g_i - y_i): gain 1 is FedVARP; gain 0 is MIFA (never_seen=zero).
    """

    gain: float = 0.75
    follow: str = "direction"
    color = "#117733"

    def __post_init__(self) -> None:
        number("gain", self.gain, low=0, high=1)
        one_of("follow", self.follow, ["direction", "innovations"])

    def init(self, w: Tensor, num_clients: int) -> GainState:
        k = torch.ones(num_clients, dtype=torch.float64, device=w.device)
        return GainState(w, memory(w, num_clients), k, k.mean(), torch.zeros(w.shape, dtype=torch.float64, device=w.device))

    def aggregate(self, state: GainState, active: Tensor, g: Tensor, step: Step) -> None:
        share, k, now = step.share.double(), state.k[active], g.double()
        total = share @ (now + state.c[active].double())  # all that the server needs of the clients: a sum
        if self.follow == "direction":
            left = 1 - state.k_mean  # the weight of the last direction
            v = state.v = (left * state.v + total) / (left + share @ k)
            state.k_mean = state.k_mean + share @ (self.gain - k)
            state.k[active] = self.gain
            state.c[active] = (self.gain * v - now).to(g.dtype)  # c_i <- gain v_t - g_i for i in S_t; absent clients keep theirs
        else:
            s = share.sum()
            v = state.v + (s + self.gain * (1 - s)) / s * total
            state.v = state.v + total
            state.c[active] = -g
        state.w = state.w - step.eta * v.to(g.dtype)
