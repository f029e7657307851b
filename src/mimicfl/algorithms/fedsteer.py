"""FedSteer: FedGain whose estimates also correct the local steps, as SCAFFOLD's control variates do; SCAFFOLD is a special case."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..errors import one_of
from .base import Step, Task, register
from .fedgain import FedGain, GainState


@register("fedsteer")
@dataclass(frozen=True)
class FedSteer(FedGain):
    """Local steps follow grad f_i(w) + v - y_i: v is the mean over all clients of their last mean gradients y_j, y_i is the client's own.

    The model moves by the new v plus `gain` times what the active clients are ahead of it; with gain 1, by the mean of their steps. A
    client not seen yet agrees with the mean of the others; with never_seen="zero" it counts as a zero update: with gain 1 this is SCAFFOLD.
    follow="direction" moves every y_j along with v by the gain, as FedGain does; with one local step it is FedGain.
    The server subtracts the shift from what a client sends and continues as FedGain, in units of one step.
    """

    gain: float = 1.0
    follow: str = "innovations"
    never_seen: str = "mean"
    color = "#e7298a"
    downloads = 2
    needs_steps = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("never_seen", self.never_seen, ["mean", "zero"])

    def unseen(self) -> float:
        return 1.0 if self.never_seen == "mean" else 0.0

    def task(self, state: GainState, active: Tensor) -> Task:
        guess = state.k[active, None] * state.v - state.c[active].double()  # the estimate of each client's gradient
        return Task(shift=(state.v - guess).to(state.w.dtype))

    def aggregate(self, state: GainState, active: Tensor, g: Tensor, step: Step) -> None:
        plain = step.per_step(g) - self.task(state, active).shift  # the mean gradient along each client's path
        steps: Any = 1.0 if step.update == "mean" else step.weights.double() @ step.K.double()  # stays on the device
        super().aggregate(state, active, plain, replace(step, eta=step.eta * steps))
