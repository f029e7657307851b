"""Candidates of `gain_search.py` that the package does not have: FedSteer with a weaker shift, and averaged evaluation of any algorithm.

`damped` is FedSteer whose shift of the local steps is multiplied by a < 1, see `Damped`. `NAME-averaged` is the algorithm NAME, trained
unchanged; what is evaluated is a running mean of its models, see `averaged`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Any

import torch
from torch import Tensor

import mimicfl as mf
from mimicfl.algorithms.base import Algorithm, State, Step, Task, make, register
from mimicfl.algorithms.fedgain import GainState
from mimicfl.errors import number

AVERAGED = ("fedavg", "mifa", "fedvarp", "mimic", "scaffold", "fedgain", "fedsteer", "damped")


@dataclass
class DampedState(GainState):
    K: Tensor  # [] float64: local steps of a client in the last round, on average


@register("damped")
@dataclass(frozen=True)
class Damped(mf.FedSteer):
    """FedSteer whose local steps follow grad f_i(w) + a (v - y_i), with a = share * horizon / (horizon + K), K local steps per round.

    Where a client's loss is curved, K steps with the shift s end where its gradient is -s, whatever it was at w: the memory then stores
    its own shift (y_i+ = y_i - v), and forgets nothing. With a < 1 it forgets by a factor a per visit, and the update of a client is at
    most 1 / (1 - a) times the one without the shift. With one local step, a does not matter. horizon=0: a = share.
    """

    share: float = 1.0
    horizon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        number("share", self.share, low=0, high=1)
        number("horizon", self.horizon, low=0)

    def init(self, w: Tensor, num_clients: int) -> DampedState:
        return DampedState(**vars(super().init(w, num_clients)), K=torch.zeros((), dtype=torch.float64, device=w.device))

    def task(self, state: GainState, active: Tensor) -> Task:
        assert isinstance(state, DampedState)
        a = self.share * (self.horizon / (self.horizon + state.K) if self.horizon else 1.0)
        return Task(shift=(a * super().task(state, active).shift).to(state.w.dtype))

    def aggregate(self, state: GainState, active: Tensor, g: Tensor, step: Step) -> None:
        assert isinstance(state, DampedState)
        super().aggregate(state, active, g, step)
        state.K = step.weights.double() @ step.K.double()


def averaged(kind: type[Algorithm[Any]], name: str) -> Callable[..., Algorithm[Any]]:
    """The algorithm with one more option, `window`: evaluated is the mean of its models w_s with weights about s^(window - 1), s = 1..t.

    w = x + (1 - window / (t + window)) (w - x) after round t = 0, 1, ...; x is the model that clients start from. The mean reaches back
    over about the last t / window rounds (polynomial-decay averaging, Shamir and Zhang, 2013).
    """

    def init(self: Any, w: Tensor, num_clients: int) -> State:
        inner = kind.init(self, w, num_clients)
        made: State = make_dataclass("AveragedState", [("x", Tensor)], bases=(type(inner),))(**vars(inner), x=w)
        return made

    def task(self: Any, state: Any, active: Tensor) -> Task:
        return replace(kind.task(self, state, active), start=state.x)

    def aggregate(self: Any, state: Any, active: Tensor, g: Tensor, step: Step) -> None:
        mean, state.w = state.w, state.x
        kind.aggregate(self, state, active, g, step)
        state.x, newest = state.w, self.window / (step.t + self.window)
        state.w = mean + newest * (state.x - mean)

    body = {"init": init, "task": task, "aggregate": aggregate, "window": 9.0, "has_direction": False, "mean_suffices": False}
    body |= {"__annotations__": {"window": float}, "__module__": __name__, "__doc__": kind.__doc__, "uploads": kind.uploads}
    made = dataclass(frozen=True)(type(f"Averaged{kind.__name__}", (kind,), body))
    assert "window" in {each.name for each in fields(made)}
    return register(name)(made)


for each in AVERAGED:
    averaged(type(make(each)), f"{each}-averaged")
