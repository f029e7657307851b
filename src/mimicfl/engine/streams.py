"""The streams cohort, for models too large to stack: one CUDA stream per client, all of them inside one graph.

Each lane owns a copy of the module whose parameters are windows into the lane's row, laid out as the convolutions like them; a
step is forward, backward and update, in place. The kernels of different clients run side by side because nothing orders them.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..data.clients import Clients, Holdout
from ..data.dataset import crop_and_flip
from ..local.losses import Loss
from ..params import trainable
from .batched.rewrite import Stackable
from .batched.step import each
from .cohort import Answers, Ask
from .graphs import Graphs
from .jobs import Jobs, Needs, hand_out, list_jobs
from .lanes import Lanes, work_off
from .support import Unsupported, halving, unmoved_buffers


class StreamsCohort:
    """Any module that can be captured in a CUDA graph."""

    name = "streams"
    MOST = 16  # lanes: beyond that nothing is gained, a large model's kernels fill the GPU

    def __init__(self, model: nn.Module, clients: Clients, loss: Loss, precision: str = "fp32", lanes: int = 0) -> None:
        unmoved_buffers(model, clients, loss)
        self.model, self.clients, self.loss, self.precision, self.width = model, clients, loss, precision, lanes or self.MOST
        self.layout = Layout(model, clients.device)
        self.needs: Needs | None = None
        self.lanes: Lanes | None = None
        self.graphs: Graphs | None = None

    @property
    def label(self) -> str:
        return f"{self.name}:{self.width}"

    def like(self, model: nn.Module) -> "StreamsCohort":
        return StreamsCohort(model, self.clients, self.loss, self.precision, 2)

    def prepare(self, needs: Needs) -> None:
        self.needs = needs

    def train(self, asks: Sequence[Ask]) -> list[Answers]:
        needs = Needs.of(asks)
        if self.needs is None or not self.needs.covers(needs):
            self.forget()
            self.needs = needs if self.needs is None else self.needs.merged(needs)
        jobs = list_jobs(asks, self.needs.batch).arranged(self.layout.arrange)
        g, total = halving(self, lambda: self._work_off(jobs))
        return hand_out(asks, jobs, self.layout.restore(g), total)

    def _work_off(self, jobs: Jobs) -> tuple[Tensor, Tensor]:
        if self.graphs is None:
            assert self.needs is not None
            self.lanes = Lanes(self.width, self.needs, jobs.w)
            self.clones = [Clone(self, self.lanes, row) for row in range(self.width)]
            try:
                self.graphs = Graphs([clone.step for clone in self.clones], self.clients.device)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise Unsupported(f"it cannot be captured in a CUDA graph ({str(error).splitlines()[0][:160]})") from error
        assert self.lanes is not None
        return work_off(jobs, self.lanes, self.graphs.advance)

    def forget(self) -> None:
        self.lanes, self.graphs, self.clones = None, None, []
        if self.clients.device.type == "cuda":
            torch.cuda.empty_cache()

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> None:
        """A large model fills the GPU alone: no faster way than one after another."""


class Layout:
    """The flat vector with every convolution's weights channels last, and back."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        parameters = trainable(model)
        self.shapes = [p.shape for p in parameters]
        order, at = [], 0
        for p in parameters:
            places = torch.arange(at, at + p.numel()).view(p.shape)
            order.append((places.permute(0, 2, 3, 1) if p.ndim == 4 else places).reshape(-1))
            at += p.numel()
        self.to_lane = torch.cat(order).to(device)
        self.to_flat = torch.argsort(self.to_lane)

    def arrange(self, rows: Tensor) -> Tensor:
        return rows[:, self.to_lane]

    def restore(self, rows: Tensor) -> Tensor:
        return rows[:, self.to_flat]

    def windows(self, row: Tensor) -> list[Tensor]:
        """One lane's row as parameters, convolutions channels last."""
        parts = row.split([shape.numel() for shape in self.shapes])
        return [
            part.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2) if len(shape) == 4 else part.view(shape)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]


class Clone:
    """One lane's copy of the module."""

    def __init__(self, cohort: StreamsCohort, lanes: Lanes, row: int) -> None:
        self.cohort, self.lanes, self.row = cohort, lanes, row
        device = cohort.clients.device
        self.module = copy.deepcopy(cohort.model).to(device).train()
        self.h = torch.zeros_like(lanes.w[row])
        self.dtype = lanes.w.dtype
        for p, w, h in zip(trainable(self.module), cohort.layout.windows(lanes.w[row]), cohort.layout.windows(self.h), strict=True):
            p.data, p.grad = w, h
        self.place = torch.arange(lanes.batch, device=device)

    def step(self) -> None:
        """One local step of this lane, in place; a lane that is through repeats its last batch, for nothing."""
        lanes, row, clients = self.lanes, self.row, self.cohort.clients
        k, steps = lanes.k[row], lanes.steps[row]
        now = torch.minimum(k, steps - 1)
        at = now * lanes.batch + self.place
        rows = lanes.samples[row][at].long()
        count = lanes.sizes[row][now]
        x, y = clients.x[rows], clients.y[rows]
        if lanes.moves is not None:
            x = crop_and_flip(x, lanes.moves[row][at].long())
        inputs = clients.data.inputs(x, self.dtype)
        if inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        self.h.zero_()
        with Keyed(lanes.keys[row] + now), half(self.cohort.precision, inputs.device):
            output = self.module(inputs)
        weights = (self.place < count).to(self.dtype) / count
        value = (each(self.cohort.loss, output.to(self.dtype), y) * weights).sum()
        value.backward()
        with torch.no_grad():
            h, w = self.h, lanes.w[row]
            if lanes.shift is not None:
                h += lanes.shift[row]
            if lanes.start is not None:
                h += lanes.mu[row] * (w - lanes.start[row])
            going = k < steps
            h = torch.where(going, h, 0.0)
            lanes.g[row] += h
            w -= lanes.eta[row] * h
            lanes.total[row] += torch.where(going, value.detach(), 0.0)
            lanes.k[row] += 1


class Keyed(Stackable):
    """Keyed dropout only: convolutions stay cuDNN's."""

    def __init__(self, key: Tensor) -> None:
        super().__init__(key, None)


@contextmanager
def half(precision: str, device: torch.device) -> Iterator[None]:
    """bfloat16 products where that was asked for."""
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        yield
