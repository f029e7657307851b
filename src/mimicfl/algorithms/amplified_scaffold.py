"""Amplified SCAFFOLD: amplified FedAvg with control variates that hold for a period (Crawshaw and Liu, 2024)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .amplified_fedavg import Amplified, AmplifiedState, amplify, no_periods
from .base import Algorithm, Instructions, Step, memory, register
from .client_memory import ClientMemory


@dataclass
class AmplifiedScaffoldState(AmplifiedState):
    c: Tensor  # [d] the server's control, always the weighted mean of the rows of c_i
    c_i: ClientMemory  # [N, d] the clients' controls, fixed during a period
    gradients: ClientMemory  # [N, d] sum of a client's mean gradients in this period
    visits: Tensor  # [N] its rounds in this period
    share: Tensor  # [N] its weight among all clients, known from its first round on


@register("amplified-scaffold")
@dataclass(frozen=True)
class AmplifiedSCAFFOLD(Amplified, Algorithm[AmplifiedScaffoldState]):
    """Amplified FedAvg whose local steps follow grad f_i(w) - c_i + c; after a period, c_i is the client's mean gradient over it.

    A client that missed the whole period keeps its control.
    """

    title = "amplified SCAFFOLD"
    color = "#44aa99"
    downloads = 2
    needs_steps = True
    has_direction = False

    def init(self, w: Tensor, num_clients: int) -> AmplifiedScaffoldState:
        numbers = torch.zeros(num_clients, dtype=torch.float64, device=w.device)
        controls = (torch.zeros_like(w), memory(w, num_clients), memory(w, num_clients))
        return AmplifiedScaffoldState(w, w.clone(), no_periods(), *controls, numbers, numbers.clone())

    def instructions(self, state: AmplifiedScaffoldState, active: Tensor) -> Instructions:
        return Instructions(shift=state.c - state.c_i[active])

    def aggregate(self, state: AmplifiedScaffoldState, active: Tensor, g: Tensor, step: Step) -> None:
        state.w = state.w - step.eta * step.mean(g)
        state.gradients[active] = state.gradients[active] + step.per_step(g) - (state.c - state.c_i[active])  # without the shift
        state.visits[active] += 1
        state.share[active] = step.share.double()
        if amplify(state, step, self.period, self.gamma):
            self._new_controls(state)

    def _new_controls(self, state: AmplifiedScaffoldState) -> None:
        seen = state.visits.nonzero()[:, 0]
        old, visits = state.c_i[seen], state.visits[seen].to(state.c.dtype)
        new = state.gradients[seen] / visits[:, None]
        state.c = state.c + state.share[seen].to(new.dtype) @ (new - old)
        state.c_i[seen] = new
        state.gradients[seen] = torch.zeros_like(new)
        state.visits = torch.zeros_like(state.visits)
