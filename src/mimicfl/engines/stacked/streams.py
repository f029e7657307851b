"""The streams engine, for models too large to stack: one CUDA stream per client, all captured in one graph.

Each lane has a copy of the module. Its parameters are views into the lane's row, in the memory layout that is fastest for convolutions.
A step is a forward pass, a backward pass and an update, in place. Kernels of different clients run in parallel because their streams are
independent. If compiled, the loss and its gradients are one function that all lanes share, with everything between convolutions fused.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value

from ...clients.losses import Loss
from ...clients.params import trainable
from ...data.augment import crop_and_flip
from ...data.clients import Clients, Holdout
from ...data.samples import Samples, mapped, rows
from ...settings.declare import MOST_LANES
from ..torch_overrides import conv2d_call
from .batched.rewrite import Stackable
from .batched.step import weighted
from .buffers import Packed
from .graphs import Graphs, compile_traced, trace
from .jobs import Jobs, Needs, Results
from .lane_engine import LaneEngine
from .lanes import Lanes
from .layout import Layout
from .module import call_with, stackable_copy
from .update import keep_buffers, update_pieces


class StreamsEngine(LaneEngine):
    """Trains any module that can be captured in a CUDA graph."""

    name = "streams"
    layout: Layout
    failure = "it cannot be captured in a CUDA graph, or compiled"
    MOST = MOST_LANES["streams"]

    def __init__(
        self, model: nn.Module, clients: Clients, loss: Loss, precision: str = "fp32", lanes: int = 0, compiled: bool = False
    ) -> None:
        super().__init__(model, clients, loss, precision, lanes or self.MOST, compiled)
        self.layout = Layout(model, clients.device)
        self.base = model  # in the precision of the lanes; the lanes' copies share its frozen parameters
        self.lanes: Lanes | None = None
        self.clones: list[Clone] = []
        self.graphs: Graphs | None = None
        self.shared: Any = None  # the compiled function of loss and gradients

    def like(self, model: nn.Module) -> "StreamsEngine":
        return StreamsEngine(model, self.clients, self.loss, self.precision, 2)

    def _build(self, needs: Needs, jobs: Jobs) -> None:
        self.lanes = Lanes(self.width, needs, jobs, half=self.precision == "bf16", scale=self._scale(needs, jobs.w[0]), pieces=True)
        half = self.lanes.half is not None
        self.base = copy.deepcopy(self.model).to(self.clients.device, torch.bfloat16) if half else self.model
        self.clones = [Clone(self, self.lanes, row) for row in range(self.width)]
        self.graphs = Graphs([clone.step for clone in self.clones], self.clients.device)

    def _run(self, jobs: Jobs) -> Results:
        assert self.lanes is not None
        assert self.graphs is not None
        return self._pass(jobs, self.lanes, self.graphs.advance)

    def _drop(self) -> None:
        self.lanes, self.clones, self.graphs, self.shared = None, [], None, None

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> None:
        """Return None: a large model fills the GPU by itself, so modules are evaluated one by one."""


class Clone:
    """One lane's copy of the module, with its training step."""

    def __init__(self, engine: StreamsEngine, lanes: Lanes, row: int) -> None:
        self.engine, self.lanes, self.row = engine, lanes, slice(row, row + 1)
        vectors = lanes.w if lanes.half is None else lanes.half  # a bfloat16 model uses a copy, which every update refreshes
        self.dtype = vectors.dtype
        self.module = stackable_copy(engine.base, engine.clients.device).train()
        self.parameters = trainable(self.module)
        for p, w in zip(self.parameters, engine.layout.windows(vectors[row]), strict=True):
            p.data = w
        self.gradients = self._compiled if engine.compiled else self._backward

    def step(self) -> None:
        """Do one local step of this lane, in place; a finished lane repeats its last batch, without effect."""
        lanes, row = self.lanes, self.row
        names = ("k", "steps", "samples", "sizes", "keys", "moves")
        job = {name: values[row] for name in names if (values := getattr(lanes, name)) is not None}
        before = {kind: rows[row] for kind, rows in lanes.buffers.items()}
        pieces, value, buffers = self.gradients(job, before, self.engine.clients.x, self.engine.clients.y)
        with torch.no_grad():
            keep_buffers(before, buffers, lanes.k[row] < lanes.steps[row])
            update_pieces(lanes, row, [piece[None] for piece in pieces])
            lanes.total[row] += torch.where(lanes.k[row] < lanes.steps[row], value, 0.0)
            lanes.k[row] += 1

    def _batch(self, job: dict[str, Tensor], x: Samples, y: Samples) -> tuple[Samples, Samples, Tensor, Tensor]:
        """Return the inputs, the targets, the samples' weights and the random key of this lane's step."""
        place = torch.arange(self.lanes.batch, device=self.lanes.w.device)
        now = torch.minimum(job["k"], job["steps"] - 1)  # [1], not a scalar, which would have to be copied to the host
        at = now * self.lanes.batch + place
        chosen = job["samples"].gather(1, at[None])[0].long()
        count = job["sizes"].gather(1, now[None])[0]
        batch = rows(x, chosen)
        if "moves" in job and isinstance(batch, Tensor):
            batch = crop_and_flip(batch, job["moves"].gather(1, at[None, :, None].expand(1, -1, 3))[0].long())
        inputs = mapped(self._laid_out, self.engine.clients.data.inputs(batch, self.lanes.w.dtype))
        return inputs, rows(y, chosen), (place < count).to(self.lanes.w.dtype) / count, (job["keys"] + now)[0]

    def _laid_out(self, x: Tensor) -> Tensor:
        """An input in the model's precision, images in the layout that is fastest for convolutions."""
        x = x.to(self.dtype) if x.is_floating_point() else x
        return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x

    def _backward(self, job: dict[str, Tensor], buffers: Packed, x: Samples, y: Samples) -> tuple[list[Tensor], Tensor, Packed]:
        """Compute the gradients with PyTorch's backward pass in this lane's module."""
        for p in self.parameters:
            p.grad = None  # avoids adding to old gradients
        inputs, targets, weights, key = self._batch(job, x, y)
        with Keyed(key, weights):
            output, buffers = self._output({}, buffers, inputs)
        value = weighted(self.engine.loss, output.to(weights.dtype), targets, weights)
        value.backward()
        # A parameter without a gradient is not used by the model.
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return self.engine.layout.pieces(found), value.detach(), buffers

    def _output(self, params: dict[str, Tensor], buffers: Packed, inputs: Samples) -> tuple[Tensor, Packed]:
        """Return the model's output and its buffers after the step."""
        packs = self.engine.buffers
        output, after = call_with(self.module, params, {name: rows[0] for name, rows in packs.stacked(buffers).items()}, inputs)
        return output, packs.packed({name: value[None] for name, value in after.items()})

    def _compiled(self, job: dict[str, Tensor], buffers: Packed, x: Samples, y: Samples) -> tuple[list[Tensor], Tensor, Packed]:
        """Compute the same with a compiled pure function, which the first lane traces and all lanes share."""
        given = ([p.detach() for p in self.parameters], job, buffers, x, y)
        if self.engine.shared is None:
            self.engine.shared = compile_traced(trace(self._pure, *given))
        return self.engine.shared(*given)  # type: ignore[no-any-return]

    def _pure(
        self, params: list[Tensor], job: dict[str, Tensor], buffers: Packed, x: Samples, y: Samples
    ) -> tuple[list[Tensor], Tensor, Packed]:
        inputs, targets, weights, key = self._batch(job, x, y)
        names = [name for name, p in self.module.named_parameters() if p.requires_grad]

        def loss(params: list[Tensor]) -> tuple[Tensor, Packed]:
            with Stackable(key, None, weights):
                output, after = self._output(dict(zip(names, params, strict=True)), buffers, inputs)
            return weighted(self.engine.loss, output.to(weights.dtype), targets, weights), after

        found, (value, after) = grad_and_value(loss, has_aux=True)(params)
        return self.engine.layout.pieces(found), value, after


class Keyed(Stackable):
    """Keyed dropout. Convolutions stay cuDNN's, but a separate function with a faster gradient adds their bias."""

    def __init__(self, key: Tensor, weights: Tensor) -> None:
        super().__init__(key, None, weights)

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
