"""Checks and fallbacks that the fast engines share: is the model supported, does the result match plain, does it fit into memory?"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..clients.params import Workspace
from ..data.clients import Clients
from ..data.dataset import Data
from ..data.samples import count, forward
from .interface import ClientUpdates
from .padding import Recorded

SAMPLES = 5
# Accepted relative error of a fast engine. A max pooling that picks another pixel changes the gradient a little; a wrong layer, completely.
TOLERANCE = {"fp32": 0.02, "tf32": 0.1, "bf16": 0.2}
SHORT = 0.01  # fraction of the usual norm; the error of a shorter gradient is taken relative to this length
USUAL = 0.01  # a usual value of a buffer
# What PyTorch says when a model cannot be stacked or captured, and what it means.
REASONS = {
    "calling .item()": "its forward pass depends on the values of tensors: .item(), an if or a loop, packed sequences",
    "random operation": "it draws random numbers other than dropout",
    "Batching rule not implemented": "it uses an operation that vmap does not support",
}
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
        text = str(error).strip()
        first = (text.splitlines() or [type(error).__name__])[0].rstrip(".")[:160]
        reason = next((words for part, words in REASONS.items() if part in text), first)
        raise Unsupported(f"{what} ({reason})" if what else f"preparing it failed ({type(error).__name__}: {reason})") from error


class Sized(Protocol):
    width: int

    def forget(self) -> None: ...


def refuse_transform(data: Data) -> None:
    """Raise `Unsupported` if the data has a transform: only plain and workers call a user's function for every batch."""
    if data.transform is not None:
        raise Unsupported("its data has a transform, a Python function of every batch")


@dataclass(frozen=True)
class BatchUse:
    """How a model uses a batch as a whole rather than sample by sample. Found by trying a few samples.

    changing     buffers that training changes, such as the running statistics of BatchNorm
    refuses_one  whether training refuses a batch of one sample, since BatchNorm would get one value per channel
    evaluation   whether batch statistics are used in evaluation mode, too (BatchNorm without running statistics)
    """

    changing: tuple[str, ...]
    refuses_one: bool
    evaluation: bool

    @classmethod
    def of(cls, model: nn.Module, clients: Clients) -> "BatchUse":
        work, device, recorded = Workspace(model, clients.device), clients.device, {}
        index = torch.arange(min(SAMPLES, count(clients.x)), device=device)
        before, devices, held = work.buffers(), [device] if device.type == "cuda" else [], dict(work.module.named_buffers())
        versions = {name: value._version for name, value in held.items()}  # counts what changes a tensor in place
        for training in (False, True):
            work.module.train(training)
            with torch.no_grad(), torch.random.fork_rng(devices), Recorded(len(index)) as recorded[training]:
                forward(work.module, clients.inputs(index))
        # A module that changes one of its buffers may change the others, which happened to stay equal here.
        written = {name for name, value in held.items() if value._version != versions[name]}
        changed = {name for name, after in work.buffers().items() if not identical(before[name], after)}
        owners = {name.rpartition(".")[0] for name in written | changed}
        changing = tuple(name for name in before if name.rpartition(".")[0] in owners)
        return cls(changing, recorded[True].values == 1, recorded[False].values > 0)


def agree(ours: ClientUpdates, plain: ClientUpdates, tolerance: float) -> None:
    """Raise `Unsupported` if the update, the loss, a buffer or a sent vector of a client differs from plain by more than the tolerance."""
    off = max(float(off.max()) for off in errors(ours, plain).values())
    if not off <= tolerance:
        raise Unsupported(f"its fast version differs from PyTorch on a test batch by {100 * off:.2g} %")


def errors(ours: ClientUpdates, true: ClientUpdates) -> dict[str, Tensor]:
    """Return the relative errors of everything that an engine must compute as plain does, by name, one per client."""
    pairs = {"g": (ours.g, true.g), "loss": (ours.loss, true.loss)} | {name: (ours.sent[name], rows) for name, rows in true.sent.items()}
    for name, rows in true.buffers.items():
        if not identical(mine := ours.buffers[name], rows):
            pairs[name] = with_usual(mine), with_usual(rows)
    return {name: distances(*pair) for name, pair in pairs.items()}


def identical(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of any type are equal; nan equals nan."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def same_buffer(ours: Tensor, true: Tensor, tolerance: float) -> bool:
    return identical(ours, true) or float(distances(with_usual(ours[None]), with_usual(true[None]))) <= tolerance


def with_usual(rows: Tensor) -> Tensor:
    """Append a value to each row, so that the error of a running mean close to zero is relative to a usual one."""
    flat = rows.reshape(len(rows), -1)
    return torch.cat([flat.double(), torch.full_like(flat[:, :1], USUAL * flat.shape[1] ** 0.5, dtype=torch.float64)], dim=1)


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
