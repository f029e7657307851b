"""What every fast cohort does before and around its work: is the model one it can train, and does memory suffice?"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import nn

from ..data.clients import Clients
from ..local.losses import Loss
from ..params import Workspace
from .cohort import Answers

SAMPLES = 5
# How far a fast cohort may be off: a maximum that falls on another pixel moves a gradient by a little, a wrong layer by all.
TOLERANCE = {"fp32": 0.02, "tf32": 0.1, "bf16": 0.2}
T = TypeVar("T")


class Unsupported(Exception):
    """The engine cannot run this model here; the text says why, as a part of a sentence."""


class Sized(Protocol):
    width: int

    def forget(self) -> None: ...


def unmoved_buffers(model: nn.Module, clients: Clients, loss: Loss) -> None:
    """Refuse models whose training changes more than their parameters (BatchNorm's running means)."""
    if not any(True for _ in model.buffers()):
        return
    work = Workspace(model, clients.device)
    work.module.train()
    before = work.buffers()
    rows = torch.arange(min(SAMPLES, len(clients.x)), device=clients.device)
    loss(work.module(clients.data.inputs(clients.x[rows], clients.dtype)), clients.y[rows])
    if any(not torch.equal(before[name], now) for name, now in work.buffers().items()):
        raise Unsupported("it keeps running statistics while training (BatchNorm; GroupNorm has none)")


def agree(ours: Answers, plain: Answers, tolerance: float) -> None:
    """Refuse a fast cohort that says something else than the plain one of the same clients."""
    for mine, true in ((ours.g, plain.g), (ours.loss, plain.loss)):
        off = float((mine - true).norm() / true.norm().clamp_min(1e-9))
        if not off <= tolerance:
            raise Unsupported(f"its fast form disagrees with PyTorch on a test batch by {100 * off:.0f} %")


def halving(cohort: Sized, work: Callable[[], T]) -> T:
    """Do the work; where memory does not suffice, with half as many clients side by side, and half again."""
    while True:
        try:
            return work()
        except torch.OutOfMemoryError:
            if cohort.width <= 1:
                raise MemoryError("one client alone does not fit the GPU's memory: use a smaller batch or model") from None
            cohort.forget()
            cohort.width //= 2
