"""What every fast cohort does before and around its work: is the model one it can train, and does memory suffice?"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..data.clients import Clients
from ..local.losses import Loss
from ..params import Workspace
from .cohort import Answers

SAMPLES = 5
# How far a fast cohort may be off: a maximum that falls on another pixel moves a gradient by a little, a wrong layer by all.
TOLERANCE = {"fp32": 0.02, "tf32": 0.1, "bf16": 0.2}
SHORT = 0.01  # of the usual length: a shorter gradient is compared as if it had this length
T = TypeVar("T")


class Unsupported(Exception):
    """The engine cannot run this model here; the text says why, as a part of a sentence."""


@contextmanager
def cannot(what: str = "") -> Iterator[None]:
    """Turn any error in this block into `Unsupported`: the engine cannot run this model. Out-of-memory errors pass through."""
    try:
        yield
    except (Unsupported, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:160]
        raise Unsupported(f"{what} ({reason})" if what else f"preparing it failed ({type(error).__name__}: {reason})") from error


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
    """Refuse a fast cohort whose update or loss differs from plain for any client."""
    off = max(float(distances(mine, true).max()) for mine, true in ((ours.g, plain.g), (ours.loss, plain.loss)))
    if not off <= tolerance:
        raise Unsupported(f"its fast form disagrees with PyTorch on a test batch by {100 * off:.2g} %")


def distances(ours: Tensor, true: Tensor) -> Tensor:
    """The relative error of each row, [m]; very short rows are compared relative to the usual length."""
    ours, true = (part.reshape(len(part), -1) for part in (ours, true))
    length = true.norm(dim=1)
    usual = length.square().mean().sqrt()
    off: Tensor = (ours - true).norm(dim=1) / torch.maximum(length, SHORT * usual).clamp_min(torch.finfo(true.dtype).tiny)
    return off


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
