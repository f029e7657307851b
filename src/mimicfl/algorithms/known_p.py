"""Known-p: each active client is weighted by the inverse of its participation rate, which is given (inverse probability weighting)."""

from dataclasses import dataclass

from torch import Tensor

from .base import Algorithm, State, Step, register


@register("known-p")
@dataclass(frozen=True)
class KnownP(Algorithm[State]):
    """w_{t+1} = w_t - eta_t sum over S_t of g_i / (N p_i), with p_i the true participation rate of client i.

    The step is unbiased for the mean over all clients, and its variance grows with 1/p_i. The rates come from the availability pattern:
    no deployment knows them, so this is a reference for algorithms that estimate them.
    """

    title = "known p"
    color = "#999933"
    needs_participation_rates = True

    def aggregate(self, state: State, active: Tensor, g: Tensor, step: Step) -> None:
        assert step.participation_rates is not None  # because of needs_participation_rates
        v = (step.share / step.participation_rates.to(step.share.dtype)) @ g
        state.w = state.w - step.eta * v
