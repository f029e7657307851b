"""Estimates of 1/p_i from the gaps between a client's rounds, as in FedAU (Wang and Ji, 2024)."""

from typing import Any

import torch
from torch import Tensor

from .base import Step


def new_gaps(w: Tensor, num_clients: int) -> tuple[Tensor, Tensor, Tensor]:
    """`gap` [N] float64: mean of the gaps counted so far, 1 before the first; `counted` [N]: how many; `since` [N]: the round in which
    the last one ended, -1 before the first."""
    gap = torch.ones(num_clients, dtype=torch.float64, device=w.device)
    counted = torch.zeros(num_clients, dtype=torch.int64, device=w.device)
    return gap, counted, counted - 1


def inverse_rates(state: Any, active: Tensor, step: Step, cutoff: int) -> Tensor:
    """omega_i [m], the mean gap of each active client before this round; then count the gap that ends now.

    A state with the fields `gap`, `counted` and `since` is changed in place. Gaps cut off during an absence are counted when the client
    returns: its weight is not needed before. A forced round begins a new gap and counts none: its clients did not choose to participate.
    """
    cuts = (step.t - 1 - state.since[active]) // cutoff
    _count(state, active, cuts, cuts * cutoff)
    omega: Tensor = state.gap[active]
    if step.forced:
        state.since[active] = step.t
    else:
        _count(state, active, torch.ones_like(cuts), step.t - state.since[active])
    return omega


def _count(state: Any, active: Tensor, more: Tensor, length: Tensor) -> None:
    """Count `more` gaps of a total length."""
    counted = state.counted[active] + more
    mean = (state.gap[active] * state.counted[active] + length) / counted.clamp(min=1)
    state.gap[active] = torch.where(counted > 0, mean, 1.0)
    state.counted[active] = counted
    state.since[active] += length
