"""The streams cohort, for models too large to stack: one CUDA stream per client, all of them inside one graph.

Each lane owns a copy of the module whose parameters are windows into the lane's row, laid out as the convolutions like them; a
step is forward, backward and update, in place. The kernels of different clients run side by side because nothing orders them.
Compiled, loss and gradients are one function that all lanes share: everything between the convolutions is fused.
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from ..config import MOST_LANES
from ..data.clients import Clients, Holdout
from ..data.dataset import crop_and_flip
from ..local.losses import Loss
from ..local.update import shortening
from ..params import trainable
from .batched.rewrite import Stackable
from .batched.step import each
from .calls import conv2d_call
from .graphs import Graphs, trace, translate
from .jobs import Jobs, Needs
from .lane_cohort import LaneCohort
from .lanes import Lanes, work_off


class StreamsCohort(LaneCohort):
    """Any module that can be captured in a CUDA graph."""

    name = "streams"
    cannot = "it cannot be captured in a CUDA graph, or compiled"
    MOST = MOST_LANES["streams"]

    def __init__(
        self, model: nn.Module, clients: Clients, loss: Loss, precision: str = "fp32", lanes: int = 0, compiled: bool = False
    ) -> None:
        super().__init__(model, clients, loss, precision, lanes or self.MOST, compiled)
        self.layout = Layout(model, clients.device)
        self.lanes: Lanes | None = None
        self.clones: list[Clone] = []
        self.graphs: Graphs | None = None
        self.shared: Any = None  # the compiled function of loss and gradients

    def like(self, model: nn.Module) -> "StreamsCohort":
        return StreamsCohort(model, self.clients, self.loss, self.precision, 2)

    def _build(self, needs: Needs, w: Tensor) -> None:
        self.lanes = Lanes(self.width, needs, w, half=self.precision == "bf16")
        self.clones = [Clone(self, self.lanes, row) for row in range(self.width)]
        self.graphs = Graphs([clone.step for clone in self.clones], self.clients.device)

    def _run(self, jobs: Jobs) -> tuple[Tensor, Tensor]:
        assert self.lanes is not None
        assert self.graphs is not None
        g, total = work_off(jobs.arranged(self.layout.arrange), self.lanes, self.graphs.advance)
        return self.layout.restore(g), total

    def _drop(self) -> None:
        self.lanes, self.clones, self.graphs, self.shared = None, [], None, None

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> None:
        """A large model fills the GPU alone: no faster way than one after another."""


class Layout:
    """The flat vector with every convolution's weights channels last and the small parameters together at the end, and back."""

    SMALL = 2**15  # numbers; an update of fewer is mostly launch, so the small ones share one

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        parameters = trainable(model)
        self.shapes = [p.shape for p in parameters]
        sizes = [p.numel() for p in parameters]
        flat = torch.arange(sum(sizes)).split(sizes)
        self.large = [i for i, size in enumerate(sizes) if size >= self.SMALL]
        self.small = [i for i, size in enumerate(sizes) if size < self.SMALL]
        order = [*self.large, *self.small]
        begins = itertools.accumulate([sizes[i] for i in order], initial=0)
        self.begin = dict(zip(order, begins, strict=False))
        self.to_lane = torch.cat([_last(flat[i].view(self.shapes[i])).reshape(-1) for i in order]).to(device)
        self.to_flat = torch.argsort(self.to_lane)

    def arrange(self, rows: Tensor) -> Tensor:
        return rows[:, self.to_lane]

    def restore(self, rows: Tensor) -> Tensor:
        return rows[:, self.to_flat]

    def windows(self, row: Tensor) -> list[Tensor]:
        """One lane's row as parameters, convolutions channels last."""
        parts = [row[self.begin[i] : self.begin[i] + shape.numel()] for i, shape in enumerate(self.shapes)]
        return [
            part.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2) if len(shape) == 4 else part.view(shape)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def pieces(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients in a row's order: the large ones one by one, the small ones as one vector."""
        large = [_last(gradients[i]).reshape(-1) for i in self.large]
        small = [_last(gradients[i]).reshape(-1) for i in self.small]
        return [*large, *([torch.cat(small)] if small else [])]


def _last(p: Tensor) -> Tensor:
    return p.permute(0, 2, 3, 1) if p.ndim == 4 else p


class Clone:
    """One lane's copy of the module."""

    def __init__(self, cohort: StreamsCohort, lanes: Lanes, row: int) -> None:
        self.cohort, self.lanes, self.row = cohort, lanes, slice(row, row + 1)
        vectors = lanes.w if lanes.half is None else lanes.half  # a bfloat16 model computes with a copy, kept up to date by the update
        self.dtype = vectors.dtype
        self.module = copy.deepcopy(cohort.model).to(cohort.clients.device, self.dtype).train()
        self.parameters = trainable(self.module)
        for p, w in zip(self.parameters, cohort.layout.windows(vectors[row]), strict=True):
            p.data = w
        self.gradients = self._compiled if cohort.compiled else self._backward

    def step(self) -> None:
        """One local step of this lane, in place; a lane that is through repeats its last batch, for nothing."""
        lanes, row = self.lanes, self.row
        names = ("k", "steps", "samples", "sizes", "keys", "moves")
        own = {name: held[row] for name in names if (held := getattr(lanes, name)) is not None}
        pieces, value = self.gradients(own, self.cohort.clients.x, self.cohort.clients.y)
        with torch.no_grad():
            if lanes.clip is not None:
                length = torch.stack([piece.to(lanes.w.dtype).norm() for piece in pieces]).norm()
                pieces = [piece * shortening(length, lanes.clip[row]) for piece in pieces]
            self._move(pieces)
            lanes.total[row] += torch.where(lanes.k[row] < lanes.steps[row], value, 0.0)
            lanes.k[row] += 1

    def _batch(self, own: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs, targets, the samples' weights and the key of chance in this lane's step."""
        place = torch.arange(self.lanes.batch, device=x.device)
        now = torch.minimum(own["k"], own["steps"] - 1)  # [1]: a single number would have to come to the host
        at = now * self.lanes.batch + place
        rows = own["samples"].gather(1, at[None])[0].long()
        count = own["sizes"].gather(1, now[None])[0]
        images = x[rows]
        if "moves" in own:
            images = crop_and_flip(images, own["moves"].gather(1, at[None, :, None].expand(1, -1, 3))[0].long())
        inputs = self.cohort.clients.data.inputs(images, self.lanes.w.dtype)
        if inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        if inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, y[rows], (place < count).to(self.lanes.w.dtype) / count, (own["keys"] + now)[0]

    def _backward(self, own: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[list[Tensor], Tensor]:
        """PyTorch's own backward pass, in this lane's module."""
        for p in self.parameters:
            p.grad = None  # gradients are then handed over instead of added up
        inputs, targets, weights, key = self._batch(own, x, y)
        with Keyed(key):
            output = self.module(inputs)
        value = (each(self.cohort.loss, output.to(weights.dtype), targets) * weights).sum()
        value.backward()
        # no gradient: a parameter that this model does not use
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return self.cohort.layout.pieces(found), value.detach()

    def _compiled(self, own: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[list[Tensor], Tensor]:
        """The same as one function of its tensors: traced by the first lane, used by all."""
        arguments = ([p.detach() for p in self.parameters], own, x, y)
        if self.cohort.shared is None:
            self.cohort.shared = translate(trace(self._pure, *arguments))
        return self.cohort.shared(*arguments)  # type: ignore[no-any-return]

    def _pure(self, params: list[Tensor], own: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[list[Tensor], Tensor]:
        inputs, targets, weights, key = self._batch(own, x, y)
        names = [name for name, p in self.module.named_parameters() if p.requires_grad]

        def loss(params: list[Tensor]) -> Tensor:
            with Stackable(key, None):
                output = functional_call(self.module, dict(zip(names, params, strict=True)), (inputs,))
            return (each(self.cohort.loss, output.to(weights.dtype), targets) * weights).sum()

        found, value = grad_and_value(loss)(params)
        return self.cohort.layout.pieces(found), value

    def _move(self, pieces: list[Tensor]) -> None:
        """The update, piece by piece of the lane's row."""
        lanes, row = self.lanes, self.row
        rows = [None if part is None else part[row][0] for part in (lanes.w, lanes.g, lanes.half, lanes.shift, lanes.start)]
        facts = (lanes.eta[row], lanes.mu[row], lanes.k[row], lanes.steps[row])
        u, momentum = (None, None) if lanes.u is None or lanes.momentum is None else (lanes.u[row][0], lanes.momentum[row])
        begin = 0
        for h in pieces:
            end = begin + h.numel()
            w, g, half, shift, start = (None if part is None else part[begin:end] for part in rows)
            assert w is not None
            assert g is not None
            _update(w, g, h, half, shift, start, facts, *((None, None) if u is None else (u[begin:end], momentum)))
            begin = end


def _update(
    w: Tensor,
    g: Tensor,
    h: Tensor,
    half: Tensor | None,
    shift: Tensor | None,
    start: Tensor | None,
    facts: tuple[Tensor, ...],
    u: Tensor | None = None,
    momentum: Tensor | None = None,
) -> None:
    """h + shift + mu (w - start), with its momentum, goes into g and, times eta, off w, where the lane is not through."""
    if w.is_cuda and w.dtype == torch.float32 and u is None:
        from .batched.kernels import move

        return move(w, g, h, half, shift, start, facts)
    eta, mu, k, steps = facts
    h = h.to(w.dtype)
    if shift is not None:
        h = h + shift
    if start is not None:
        h = h + mu * (w - start)
    if u is not None and momentum is not None:
        h = u.copy_(momentum * u + h)
    h = torch.where(k < steps, h, 0.0)
    g += h
    w -= eta * h
    if half is not None:
        half.copy_(w)
    return None


class Keyed(Stackable):
    """Keyed dropout; convolutions stay cuDNN's, but their bias is added by a function whose gradient is one quick sum."""

    def __init__(self, key: Tensor) -> None:
        super().__init__(key, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            x, w, bias, *how = conv2d_call(*args, **(kwargs or {}))
            if bias is not None and x.is_cuda and x.ndim == 4 and x.dtype != torch.float64:
                return AddBias.apply(torch.conv2d(x, w, None, *how), bias)
        return super().__torch_function__(func, types, args, kwargs)


class AddBias(torch.autograd.Function):
    """x [B, C, H, W] + bias [C]."""

    apply: Any

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return x + bias[:, None, None]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        from .batched.kernels import columns

        return dy, columns(dy.permute(0, 2, 3, 1).reshape(-1, dy.shape[1])).to(ctx.dtype)
