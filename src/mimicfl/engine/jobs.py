"""The active clients of one or many runs as one list of jobs: which samples, in which step, at which rate."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from ..local.train import draw
from ..seeds import number
from .cohort import Answers, Ask


@dataclass(frozen=True)
class Needs:
    """What the largest job asks of a lane; programs are built for it."""

    batch: int
    steps: int
    shift: bool = False
    prox: bool = False
    augment: bool = False
    momentum: bool = False
    clip: bool = False

    def covers(self, other: "Needs") -> bool:
        return all(getattr(self, field.name) >= getattr(other, field.name) for field in fields(self))

    @classmethod
    def of(cls, asks: Sequence[Ask]) -> "Needs":
        """For these asks and all like them: any client of their populations."""
        plans = [plan for ask in asks for plan in _plans(ask)]
        return cls(
            batch=max(max(sizes) for sizes in plans),
            steps=max(len(sizes) for sizes in plans),
            shift=any(isinstance(ask.task.shift, Tensor) or ask.task.shift != 0 for ask in asks),
            prox=any(ask.task.mu != 0 for ask in asks),
            augment=asks[0].clients.data.augment,
            momentum=any(ask.local.momentum != 0 for ask in asks),
            clip=any(ask.local.clip_norm != 0 for ask in asks),
        )

    def merged(self, other: "Needs") -> "Needs":
        return Needs(*[max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)])


@dataclass(frozen=True)
class Jobs:
    """Rows are jobs; a job's batches lie end to end, each in `batch` places, the last of a pass filled up with its first sample."""

    steps: np.ndarray  # [J] how many batches
    sizes: Tensor  # [J, K] int32 samples in each batch
    samples: Tensor  # [J, K * batch] int32 rows of the data
    moves: Tensor | None  # [J, K * batch, 3] int8 crops and flips, where the data is augmented
    keys: Tensor  # [J] int64, for the chance in layers
    ask: np.ndarray  # [J] which ask it belongs to
    eta: Tensor  # [J]
    mu: Tensor  # [J]
    momentum: Tensor  # [J]
    clip: Tensor  # [J] infinite where nothing is clipped
    w: Tensor  # [asks, d]
    shift: Tensor | None  # [J, d]

    def __len__(self) -> int:
        return len(self.steps)

    def arranged(self, arrange: Callable[[Tensor], Tensor]) -> "Jobs":
        """The same jobs with every vector in another order."""
        return replace(self, w=arrange(self.w), shift=None if self.shift is None else arrange(self.shift))


def list_jobs(asks: Sequence[Ask], batch: int) -> Jobs:
    """Everything the lanes need to know, on the device."""
    plans = [_plan(ask, client, batch) for ask in asks for client in ask.active.tolist()]
    steps = np.array([len(sizes) for sizes, _, _ in plans])
    most = int(steps.max())
    sizes = np.ones((len(plans), most), dtype=np.int32)
    samples = np.zeros((len(plans), most * batch), dtype=np.int32)
    augment = plans[0][2] is not None
    moves = np.zeros((len(plans), most * batch, 3), dtype=np.int8) if augment else None
    for job, (own, rows, shifts) in enumerate(plans):
        sizes[job, : len(own)] = own
        samples[job, : len(rows)] = rows
        if moves is not None and shifts is not None:
            moves[job, : len(rows)] = shifts
    device, dtype = asks[0].w.device, asks[0].w.dtype
    belongs = np.repeat(np.arange(len(asks)), [len(ask.active) for ask in asks])

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[torch.from_numpy(belongs).to(device)]

    def up(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Jobs(
        steps=steps,
        sizes=up(sizes),
        samples=up(samples),
        moves=None if moves is None else up(moves),
        keys=up(np.array([number(ask.seed, "layers", ask.t, client) for ask in asks for client in ask.active.tolist()])),
        ask=belongs,
        eta=column([ask.eta_L for ask in asks]),
        mu=column([ask.task.mu for ask in asks]),
        momentum=column([ask.local.momentum for ask in asks]),
        clip=column([ask.local.clip_norm or math.inf for ask in asks]),
        w=torch.stack([ask.w for ask in asks]),
        shift=_shifts(asks),
    )


def _plan(ask: Ask, client: int, batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """One client's batch sizes, sample rows and moves, every batch filled up to `batch` places."""
    drawn, order, moves = draw(ask.clients, client, ask.local, ask.seed, (ask.t, client))
    sizes, rows = np.array(drawn), ask.clients.split[client][order]
    if (sizes != batch).any():
        begin = np.cumsum(sizes) - sizes
        place = np.arange(batch)
        spread = (begin[:, None] + np.where(place < sizes[:, None], place, 0)).reshape(-1)
        rows, moves = rows[spread], None if moves is None else moves[spread]
    return sizes, rows, None if moves is None else moves.astype(np.int8)


def _shifts(asks: Sequence[Ask]) -> Tensor | None:
    if not any(isinstance(ask.task.shift, Tensor) or ask.task.shift for ask in asks):
        return None
    d = asks[0].w.numel()
    parts = []
    for ask in asks:
        shift = ask.task.shift
        parts.append(shift if isinstance(shift, Tensor) else ask.w.new_full((len(ask.active), d), float(shift)))
    return torch.cat(parts)


def hand_out(asks: Sequence[Ask], jobs: Jobs, g: Tensor, total: Tensor) -> list[Answers]:
    """Results [J, ...] back to the runs they belong to."""
    steps = torch.from_numpy(jobs.steps).to(g.device)
    loss = total / steps.to(total.dtype)
    cut = [len(ask.active) for ask in asks]
    parts = zip(asks, g.split(cut), steps.split(cut), loss.split(cut), strict=True)
    return [Answers(rows, K, mean, _unchanged(ask)) for ask, rows, K, mean in parts]


def _unchanged(ask: Ask) -> dict[str, Tensor]:
    """Buffers that training does not touch, as every client would send them back."""
    return {name: value.expand(len(ask.active), *value.shape) for name, value in ask.buffers.items()}


def _plans(ask: Ask) -> list[list[int]]:
    """The batches of any client that may be the widest or the longest."""
    sizes = ask.clients.sizes
    likely = range(len(sizes)) if ask.local.lists else (int(sizes.argmax()), int(sizes.argmin()))
    return [ask.local.batch_sizes(int(sizes[client]), client) for client in likely]
