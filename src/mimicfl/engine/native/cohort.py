"""The native cohort: same questions and answers as the plain one, in compiled code, one client per thread at a time."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ...data.clients import Clients, Holdout
from ...data.dataset import Data
from ...local.losses import Loss
from ...local.train import draw
from ...params import flatten
from ...seeds import number
from ..cohort import Answers, Ask
from ..support import Unsupported
from . import preparing
from .build import open_library
from .generate import generate
from .trace import trace
from .verify import loss_name, verify

Part = tuple[np.ndarray, list[int]]  # a client's samples in the order of training, and its batch sizes
Floats = Sequence[float]
MOST_OUTPUTS = 1 << 16  # the loss keeps one sample's outputs on the stack


class Program:
    """A compiled network with a loss."""

    @preparing()
    def __init__(self, model: nn.Module, data: Data, loss: Loss, flags: tuple[str, ...] = ()) -> None:
        _check_inputs(data)
        self.uint8 = data.x_train.dtype == torch.uint8 and not data.augment
        self.kind = loss_name(loss, data)
        self.layers = trace(model, tuple(data.x_train.shape[1:]))
        self.outputs = math.prod(self.layers[-1].out)
        self._check_outputs(data)
        self.source = generate(self.layers, flatten(model).numel(), self.kind, self.uint8)
        self.code = open_library(self.source, flags)
        self.data = data
        self.table = _table(data, self.layers[0].shape[0]) if self.uint8 else _floats(1)

    def _check_outputs(self, data: Data) -> None:
        """Check what the compiled loss does not: it reads a target without bounds checks."""
        if self.outputs > MOST_OUTPUTS:
            raise Unsupported(f"it has more than {MOST_OUTPUTS} outputs")
        if self.kind == "cross-entropy" and data.num_classes > self.outputs:
            raise Unsupported("it has fewer outputs than classes")
        if self.kind == "mse" and (targets := math.prod(data.y_train.shape[1:])) != self.outputs:
            raise Unsupported(f"it has {self.outputs} outputs but {targets} targets per sample")

    def pool(self, x: Tensor) -> Tensor:
        """Samples as the compiled code reads them: uint8 as stored, anything else as float32 inputs."""
        pool = x if self.uint8 else self.data.inputs(x, torch.float32)
        if pool.dtype != (torch.uint8 if self.uint8 else torch.float32) or x.shape[1:] != self.data.x_train.shape[1:]:
            raise Unsupported(f"it was not compiled for samples of type {_name(x)} and shape {list(x.shape[1:])}")
        return pool.contiguous()

    def target(self, y: Tensor) -> Tensor:
        return (y.long() if self.kind == "cross-entropy" else y.float()).contiguous()

    def predict(self, w: Tensor, pool: Tensor, threads: int) -> Tensor:
        """Outputs [n, outputs] in evaluation mode."""
        out = _floats(len(pool), self.outputs)
        w = w.contiguous()
        failed = self.code.mimicfl_outputs(_pointer(w), _pointer(pool), _pointer(self.table), len(pool), _pointer(out), threads)
        if failed:
            raise MemoryError("the native engine could not allocate its workspace")
        return out

    def train(self, w: Tensor, pool: Tensor, target: Tensor, plan: "Plan", shift: Tensor | None, threads: int) -> tuple[Tensor, Tensor]:
        """g [m, d] and the summed batch losses [m] of one round; w is [d], or [models, d] with `plan.model` saying which is whose."""
        m = len(plan.begin)
        g = _floats(m, w.shape[-1])
        loss = np.empty(m)
        w = w.contiguous()
        shift = None if shift is None else shift.contiguous()
        arrays: list[np.ndarray] = [plan.rows, plan.begin, plan.sizes, plan.step]
        failed = self.code.mimicfl_train(
            *[_pointer(w), plan.model.ctypes.data, _pointer(g), loss.ctypes.data],
            *[_pointer(pool), _pointer(self.table), _pointer(target), *[array.ctypes.data for array in arrays]],
            *[None if shift is None else _pointer(shift), plan.keys.ctypes.data, plan.eta.ctypes.data, plan.mu.ctypes.data],
            *[plan.momentum.ctypes.data, plan.clip.ctypes.data, m, threads],
        )
        if failed:
            raise MemoryError("the native engine could not allocate its workspace")
        return g, torch.from_numpy(loss)

    def step(self, w: Tensor, pool: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient [d] and the loss [1] of all these samples as one batch."""
        g, loss = self.train(w, pool, target, Plan([(np.arange(len(pool)), [len(pool)])], [0]), None, 1)
        return g[0], loss


class Plan:
    """Which samples each client takes in which step, end to end as the compiled code wants them, and its rates and beginning."""

    def __init__(
        self,
        parts: list[Part],
        keys: list[int],
        eta: Floats = (0.0,),
        mu: Floats = (0.0,),
        momentum: Floats = (0.0,),
        clip: Floats = (0.0,),
        model: Sequence[int] = (0,),
    ) -> None:
        self.rows = np.ascontiguousarray(np.concatenate([rows for rows, _ in parts]), dtype=np.int64)
        self.begin = np.cumsum([0] + [len(rows) for rows, _ in parts])[:-1].astype(np.int64)
        self.sizes = np.concatenate([sizes for _, sizes in parts]).astype(np.int32)
        self.step = np.cumsum([0] + [len(sizes) for _, sizes in parts]).astype(np.int64)
        self.keys = np.array(keys, dtype=np.uint64)
        self.eta, self.mu, self.momentum, self.clip = (np.array(given, dtype=np.float32) for given in (eta, mu, momentum, clip))
        self.model = np.array(model, dtype=np.int32)


class NativeCohort:
    """Trains the clients of a round in compiled code, those of several runs side by side."""

    name = label = "native"
    room = None

    @preparing()
    def __init__(self, model: nn.Module, clients: Clients, loss: Loss, flags: tuple[str, ...] = ()) -> None:
        if clients.device.type != "cpu":
            raise Unsupported("it runs on the CPU only")
        self.clients, self.loss = clients, loss
        self.program = Program(model, clients.data, loss, flags)
        self.target = self.program.target(clients.y)
        self.pool = None if clients.data.augment else self.program.pool(clients.x)
        self.tests: tuple[Tensor, Tensor] | None = None  # the last test samples, as given and as the compiled code reads them
        verify(self.program, lambda other: Program(other, clients.data, loss, flags), model, clients, loss)

    def like(self, model: nn.Module) -> "NativeCohort":
        return NativeCohort(model, self.clients, self.loss)

    def train(self, asks: Sequence[Ask]) -> list[Answers]:
        jobs = [(a, row) for a, ask in enumerate(asks) for row in range(len(ask.active))]
        # Augmented batches exist only for their client: one at a time.
        parts = [self._train(asks, part) for part in ([jobs] if self.pool is not None else [[job] for job in jobs])]
        g, K, loss = (torch.cat([getattr(part, name) for part in parts]) for name in ("g", "K", "loss"))
        cut = [len(ask.active) for ask in asks]
        return [Answers(*rows) for rows in zip(g.split(cut), K.split(cut), loss.split(cut), strict=True)]

    def _train(self, asks: Sequence[Ask], jobs: list[tuple[int, int]]) -> Answers:
        parts: list[Part] = []
        keys, shifts, pool, target = [], [], self.pool, self.target
        for ask, row in [(asks[a], row) for a, row in jobs]:
            client, clients = int(ask.active[row]), ask.clients
            sizes, order, moves = draw(clients, client, ask.local, ask.seed, (ask.t, client))
            rows = clients.split[client][order]
            if pool is None:
                x, y = zip(*clients.batches(client, order, sizes, moves), strict=True)
                pool, target, rows = torch.cat(x).contiguous(), self.program.target(torch.cat(y)), np.arange(len(order))
            parts.append((rows, sizes))
            keys.append(number(ask.seed, "layers", ask.t, client))
            shifts.append(ask.task.shift[row] if isinstance(ask.task.shift, Tensor) else ask.w.new_full(ask.w.shape, float(ask.task.shift)))
        assert pool is not None
        shifted = any(isinstance(ask.task.shift, Tensor) or ask.task.shift for ask in asks)
        own = [asks[a] for a, _ in jobs]
        rates = ([ask.eta_L for ask in own], [ask.task.mu for ask in own])
        terms = ([ask.local.momentum for ask in own], [ask.local.clip_norm for ask in own])
        plan = Plan(parts, keys, *rates, *terms, [a for a, _ in jobs])
        w = torch.stack([ask.w for ask in asks])
        g, loss = self.program.train(w, pool, target, plan, torch.stack(shifts) if shifted else None, torch.get_num_threads())
        steps = torch.tensor([len(sizes) for _, sizes in parts])
        return Answers(g, steps, (loss / steps).to(torch.float32))

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> Tensor | None:
        """Test outputs [r, n, outputs] of r models [r, d]; None for samples that the compiled code cannot read."""
        if self.tests is None or self.tests[0] is not samples.x:
            try:
                self.tests = samples.x, self.program.pool(samples.x)
            except Unsupported:
                return None
        return torch.stack([self.program.predict(one, self.tests[1], torch.get_num_threads()) for one in w])


def _check_inputs(data: Data) -> None:
    for x in (data.x_train, data.x_test):
        if x.dtype != torch.uint8 and not x.is_floating_point():
            raise Unsupported(f"its inputs are {_name(x)}")
    if (data.x_train.dtype == torch.uint8) != (data.x_test.dtype == torch.uint8):
        raise Unsupported(f"its training samples are {_name(data.x_train)} and its test samples {_name(data.x_test)}")


def _table(data: Data, channels: int) -> Tensor:
    """What each of the 256 byte values becomes, per channel, by the data's own formula."""
    shape = data.x_train.shape[1:]
    values = torch.arange(256, dtype=torch.uint8).view(256, *[1] * len(shape)).expand(256, *shape)
    inputs = data.inputs(values, torch.float32).reshape(256, channels, -1)
    if not torch.equal(inputs[:, :, :1].expand_as(inputs), inputs):
        raise Unsupported("its inputs are scaled differently within a channel")
    return inputs[:, :, 0].t().contiguous()


def _floats(*shape: int) -> Tensor:
    """Memory for the compiled code to fill, independent of PyTorch's default type and device."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _pointer(tensor: Tensor) -> int:
    return tensor.data_ptr()
