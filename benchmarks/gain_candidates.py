"""Candidates of `gain_search.py` that the package does not have: FedSteer with a weaker shift, and averaged evaluation of any algorithm.

`damped` is FedSteer whose shift of the local steps is multiplied by a constant, see `Damped`. `NAME-averaged` is the algorithm NAME,
trained unchanged; what is evaluated is a running mean of its models, see `averaged`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Any

from torch import Tensor

import mimicfl as mf
from mimicfl.algorithms.base import Algorithm, State, Step, Task, make, register
from mimicfl.algorithms.fedsteer import SteerState
from mimicfl.errors import number

AVERAGED = ("fedavg", "mifa", "fedvarp", "mimic", "scaffold")  # fedgain and fedsteer have the option


@register("damped")
@dataclass(frozen=True)
class Damped(mf.FedSteer):
    """FedSteer whose shift is multiplied by `share`, whatever the number of local steps."""

    share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        number("share", self.share, low=0, high=1)

    def task(self, state: SteerState, active: Tensor) -> Task:
        task = super().task(state, active)
        return replace(task, shift=self.share * task.shift)


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
