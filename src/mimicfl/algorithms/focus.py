"""FOCUS: clients track how their gradients change, and the server adds the changes up (Ying, Li and Yuan, 2025)."""

from dataclasses import dataclass

from torch import Tensor

from .base import Algorithm, Instructions, State, Step, memory, register
from .client_memory import ClientMemory


@dataclass
class FocusState(State):
    m: ClientMemory  # [N, d] each client's gradient in the last step of its last round; zero until it has been seen
    y: Tensor  # [d] sum of the rows of m over all clients


@register("focus")
@dataclass(frozen=True)
class FOCUS(Algorithm[FocusState]):
    """Local steps follow grad f_i(w) - m_i; then y <- y + sum over S_t of (m_i+ - m_i) and w_{t+1} = w_t - eta_t y.

    m_i+ is the gradient of the last local step. y becomes the sum of all clients' gradients, whichever clients participate. A client keeps
    m_i and sends m_i+ - m_i, and the server needs only the sum. As published, y is a sum over the clients, not a mean: the rate must suit
    that.
    """

    color = "#661100"
    sends_g = False

    def init(self, w: Tensor, num_clients: int) -> FocusState:
        return FocusState(w, memory(w, num_clients), w * 0)

    def instructions(self, state: FocusState, active: Tensor) -> Instructions:
        return Instructions(shift=-state.m[active], send=("last_gradient",))

    def aggregate(self, state: FocusState, active: Tensor, g: Tensor, step: Step) -> None:
        new = step.sent["last_gradient"]
        state.y = state.y + state.m.shape[0] * (step.share @ (new - state.m[active]))
        state.m[active] = new
        state.w = state.w - step.eta * state.y
