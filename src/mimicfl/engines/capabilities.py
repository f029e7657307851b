"""Checks and fallbacks that the fast engines share: is the model supported, does the result match plain, does it fit into memory?"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..clients.losses import Loss
from ..clients.params import Workspace
from ..data.clients import Clients
from ..data.dataset import Data
from ..data.samples import count, forward, rows
from .interface import ClientUpdates

SAMPLES = 5
# Accepted relative error of a fast engine. A max pooling that picks another pixel changes the gradient a little; a wrong layer, completely.
TOLERANCE = {"fp32": 0.02, "tf32": 0.1, "bf16": 0.2}
SHORT = 0.01  # fraction of the usual norm; the error of a shorter gradient is taken relative to this length
T = TypeVar("T")


class Unsupported(Exception):
    """The engine cannot run this model here. The message is the reason, phrased as a part of a sentence."""


@contextmanager
def unsupported_on_error(what: str = "") -> Iterator[None]:
    """Turn any error in this block into `Unsupported`. Out-of-memory errors pass through."""
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


def refuse_transform(data: Data) -> None:
    """Raise `Unsupported` if the data has a transform: only plain and workers call a user's function for every batch."""
    if data.transform is not None:
        raise Unsupported("its data has a transform, a Python function of every batch")


def refuse_changing_buffers(model: nn.Module, clients: Clients, loss: Loss) -> None:
    """Raise `Unsupported` if training changes the model's buffers, such as the running means of BatchNorm."""
    if not any(True for _ in model.buffers()):
        return
    work = Workspace(model, clients.device)
    work.module.train()
    before = work.buffers()
    index = torch.arange(min(SAMPLES, count(clients.x)), device=clients.device)
    loss(forward(work.module, clients.inputs(index)), rows(clients.y, index))
    if any(not torch.equal(before[name], now) for name, now in work.buffers().items()):
        raise Unsupported("it keeps running statistics while training (BatchNorm; GroupNorm has none)")


def agree(ours: ClientUpdates, plain: ClientUpdates, tolerance: float) -> None:
    """Raise `Unsupported` if the update, the loss or another vector of any client differs from plain by more than the tolerance."""
    off = max(float(distances(mine, compared(plain)[name]).max()) for name, mine in compared(ours).items())
    if not off <= tolerance:
        raise Unsupported(f"its fast version differs from PyTorch on a test batch by {100 * off:.2g} %")


def compared(updates: ClientUpdates) -> dict[str, Tensor]:
    """Return what an engine must compute as plain does, by name."""
    return {"g": updates.g, "loss": updates.loss, **updates.sent}


def distances(ours: Tensor, true: Tensor) -> Tensor:
    """Return the relative error of each row, [m]. The error of a very short row is relative to the usual norm instead."""
    ours, true = (part.reshape(len(part), -1) for part in (ours, true))
    length = true.norm(dim=1)
    usual = length.square().mean().sqrt()
    off: Tensor = (ours - true).norm(dim=1) / torch.maximum(length, SHORT * usual).clamp_min(torch.finfo(true.dtype).tiny)
    return off


def halve_until_it_fits(engine: Sized, work: Callable[[], T]) -> T:
    """Do the work. Each time the device runs out of memory, halve the number of parallel clients and try again."""
    while True:
        try:
            return work()
        except torch.OutOfMemoryError:
            if engine.width <= 1:
                raise MemoryError("one client alone does not fit into the GPU's memory; use a smaller batch size or model") from None
            engine.forget()
            engine.width //= 2
