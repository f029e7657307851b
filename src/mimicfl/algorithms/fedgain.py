"""FedGain: estimate absent clients by their last update plus a gain times the others' change; 0 is MIFA, 1 is MimiC or FedVARP."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import number, one_of
from .base import Algorithm, State, Step, memory, register
from .client_memory import ClientMemory


@dataclass
class GainState(State):
    c: ClientMemory  # [N, d] k_i u_i - y_i of each client's last round
    k: Tensor  # [N] float64: how far the memory of each client follows the direction; its first value says how unseen clients count
    k_mean: Tensor  # [] float64: mean of k over all N clients
    v: Tensor  # [d] float64: the mean of all clients' memories, moved along with the direction by k


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

    def unseen(self) -> float:
        """k of a client not seen yet: 1, it agrees with the mean of the others; 0, it counts as a zero update."""
        return 1.0 if self.follow == "direction" else 0.0

    def init(self, w: Tensor, num_clients: int) -> GainState:
        k = torch.full((num_clients,), self.unseen(), dtype=torch.float64, device=w.device)
        v = torch.zeros(w.shape, dtype=torch.float64, device=w.device)
        return GainState(w, memory(w, num_clients), k, k.mean(), v)

    def aggregate(self, state: GainState, active: Tensor, g: Tensor, step: Step) -> None:
        share, k, now = step.share.double(), state.k[active], g.double()
        changed = now + state.c[active].double()  # g_i + c_i; the server needs only its sum
        total, left = share @ changed, 1 - state.k_mean  # left: the weight of the last direction
        all_follow = (total + (share @ (1 - k)) * state.v) / share.sum()  # every client moves as the active ones did
        v = state.v = (left * state.v + total) / (left + share @ k)
        held = self.gain if self.follow == "direction" else 0.0
        state.k_mean = state.k_mean + share @ (held - k)
        state.k[active] = held
        state.c[active] = (held * v - now).to(g.dtype)  # absent clients keep theirs
        if self.follow == "innovations":
            v = v + self.gain * (all_follow - v)  # for this round only: the memories stay
        state.w = state.w - step.eta * v.to(g.dtype)
