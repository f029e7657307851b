"""FedSteer: FedGain whose guess of what every client wants now also corrects the local steps, as SCAFFOLD's control variates do."""

from dataclasses import dataclass, replace

from torch import Tensor

from .base import Step, Task, register
from .fedgain import FedGain, GainState


@register("fedsteer")
@dataclass(frozen=True)
class FedSteer(FedGain):
    """Local steps follow grad f_i(w) + v_{t-1} - (guess for client i); v_t is the mean of the guesses over ALL N clients.

    The guess for client i is y_i + gain (v_{t-1} - u_i): its mean gradient when it participated last, moved along with the direction since
    then; with FedGain's c_i = gain u_i - y_i the shift of its steps is c_i + (1 - gain) v_{t-1}. A client not seen yet has none. The server
    subtracts the shift from what a client sends and continues as FedGain, in units of one step. With one local step it is FedGain.
    follow="innovations" with gain 1 is SCAFFOLD.
    """

    gain: float = 0.6
    color = "#e7298a"
    downloads = 2
    needs_steps = True

    def task(self, state: GainState, active: Tensor) -> Task:
        own = 1 - state.k[active, None] if self.follow == "direction" else 1.0  # the share of v_{t-1} that c_i does not hold
        return Task(shift=(state.c[active].double() + own * state.v).to(state.w.dtype))

    def aggregate(self, state: GainState, active: Tensor, g: Tensor, step: Step) -> None:
        plain = step.per_step(g) - self.task(state, active).shift  # the mean gradient along each client's path
        steps = 1.0 if step.update == "mean" else float(step.weights.double() @ step.K.double())
        super().aggregate(state, active, plain, replace(step, eta=step.eta * steps))
