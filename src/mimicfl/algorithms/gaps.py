"""Estimates of 1/p_i from the gaps between a client's rounds, as in FedAU (Wang and Ji, 2024)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .base import Step
from .client_numbers import on_device, on_host


def new_gaps(num_clients: int) -> tuple[Tensor, Tensor, Tensor]:
    """`gap` [N] float64: mean of the gaps counted so far, 1 before the first; `counted` [N]: how many; `since` [N]: the round in which
    the last one ended, -1 before the first. In host memory: on a GPU, launching the kernels would take longer than the computation."""
    counted = torch.zeros(num_clients, dtype=torch.int64, device="cpu")
    return torch.ones(num_clients, dtype=torch.float64, device="cpu"), counted, counted - 1


def inverse_rates(state: Any, active: Tensor, step: Step, cutoff: int) -> Tensor:
    """omega_i [m], the mean gap of each active client before this round; then count the gap that ends now.

    A state with the fields `gap`, `counted` and `since` is changed in place. Gaps cut off during an absence are counted when the client
    returns: its weight is not needed before. A forced round begins a new gap and counts none: its clients did not choose to participate.
    """
    clients, since = on_host(active), state.since.numpy()
    cuts = (step.t - 1 - since[clients]) // cutoff
    _count(state, clients, cuts, cuts * cutoff)
    omega = state.gap.numpy()[clients]
    if step.forced:
        since[clients] = step.t
    else:
        _count(state, clients, np.ones_like(cuts), step.t - since[clients])
    return on_device(omega, active.device)


def _count(state: Any, clients: np.ndarray, more: np.ndarray, length: np.ndarray) -> None:
    """Count `more` gaps of a total length."""
    gap, counted, since = state.gap.numpy(), state.counted.numpy(), state.since.numpy()
    total = counted[clients] + more
    mean = (gap[clients] * counted[clients] + length) / np.maximum(total, 1)
    gap[clients] = np.where(total > 0, mean, 1.0)
    counted[clients] = total
    since[clients] += length
