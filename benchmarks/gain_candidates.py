"""A candidate of `gain_search.py` that the package does not have: FedSteer with a weaker shift."""

from dataclasses import dataclass, replace

from torch import Tensor

import mimicfl as mf
from mimicfl.algorithms.base import Instructions, register
from mimicfl.algorithms.fedsteer import SteerState
from mimicfl.errors import number


@register("damped")
@dataclass(frozen=True)
class Damped(mf.FedSteer):
    """FedSteer whose shift is multiplied by `share`, whatever the number of local steps."""

    share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        number("share", self.share, low=0, high=1)

    def instructions(self, state: SteerState, active: Tensor) -> Instructions:
        given = super().instructions(state, active)
        return replace(given, shift=self.share * given.shift)
