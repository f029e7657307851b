"""The native cohort: same questions and answers as the plain one, in compiled code, one client per thread at a time."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.clients import Clients, Holdout
from ...data.dataset import Data
from ...local.losses import LOSSES, Loss
from ...local.train import draw
from ...params import flatten
from ...seeds import number
from ..calls import without_dropout
from ..cohort import Answers, Ask
from ..support import Unsupported
from .build import open_library
from .generate import generate
from .trace import trace

Part = tuple[np.ndarray, list[int]]  # a client's samples in the order of training, and its batch sizes
Floats = Sequence[float]
CHECK_SAMPLES = 5
CHECK_TOLERANCE = 1e-4  # of the largest value; a wrong layer is off by far more, float32 rounding by far less


class Program:
    """A compiled network with a loss."""

    def __init__(self, model: nn.Module, data: Data, loss: Loss, flags: tuple[str, ...] = ()) -> None:
        self.uint8 = data.x_train.dtype == torch.uint8 and not data.augment
        if not (self.uint8 or data.x_train.is_floating_point() or data.augment):
            raise Unsupported(f"its inputs are {str(data.x_train.dtype).removeprefix('torch.')}")
        self.kind = loss_name(loss, data)
        self.layers = trace(model, tuple(data.x_train.shape[1:]))
        self.outputs = self.layers[-1].out[0]
        if self.layers[-1].out[1:] != (1, 1):
            raise Unsupported("its output is not flat")
        if data.num_classes > self.outputs:
            raise Unsupported("it has fewer outputs than classes")
        self.source = generate(self.layers, flatten(model).numel(), self.kind, self.uint8)
        self.code = open_library(self.source, flags)
        self.data = data
        self.table = _table(data, self.layers[0].shape[0]) if self.uint8 else torch.zeros(1)

    def pool(self, x: Tensor) -> Tensor:
        """Samples as the compiled code reads them: uint8 as stored, anything else as float32 inputs."""
        return (x if self.uint8 else self.data.inputs(x, torch.float32)).contiguous()

    def target(self, y: Tensor) -> Tensor:
        return (y.long() if self.kind == "cross-entropy" else y.float()).contiguous()

    def predict(self, w: Tensor, pool: Tensor, threads: int) -> Tensor:
        """Outputs [n, outputs] in evaluation mode."""
        out = torch.empty(len(pool), self.outputs)
        failed = self.code.mimicfl_outputs(
            _pointer(w.contiguous()), _pointer(pool), _pointer(self.table), len(pool), _pointer(out), threads
        )
        if failed:
            raise MemoryError("the native engine could not allocate its workspace")
        return out

    def train(self, w: Tensor, pool: Tensor, target: Tensor, plan: "Plan", shift: Tensor | None, threads: int) -> tuple[Tensor, Tensor]:
        """g [m, d] and the summed batch losses [m] of one round; w is [d], or [models, d] with `plan.model` saying which is whose."""
        m = len(plan.begin)
        g = torch.empty(m, w.shape[-1])
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

    def __init__(self, model: nn.Module, clients: Clients, loss: Loss, flags: tuple[str, ...] = ()) -> None:
        if clients.device.type != "cpu":
            raise Unsupported("it runs on the CPU only")
        self.clients, self.loss = clients, loss
        self.program = Program(model, clients.data, loss, flags)
        self.target = self.program.target(clients.y)
        self.pool = None if clients.data.augment else self.program.pool(clients.x)
        self.tests: dict[int, Tensor] = {}
        check(self.program, model, clients, loss)

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

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> Tensor:
        """Test outputs [r, n, outputs] of r models [r, d]."""
        pool = self.tests.setdefault(id(samples.x), self.program.pool(samples.x))
        return torch.stack([self.program.predict(one, pool, torch.get_num_threads()) for one in w])


def loss_name(loss: Loss, data: Data) -> str:
    for name in ("cross-entropy", "mse"):
        if loss is LOSSES.find(name):
            return name
    plain = isinstance(loss, nn.CrossEntropyLoss) and loss.weight is None and loss.reduction == "mean" and loss.label_smoothing == 0
    if (loss is F.cross_entropy or plain) and data.num_classes:
        return "cross-entropy"
    raise Unsupported("its loss is neither cross-entropy nor mse")


def check(program: Program, model: nn.Module, clients: Clients, loss: Loss) -> None:
    """The compiled network against autograd on a few samples: whatever the tracing missed is found here, before it matters."""
    rows = np.arange(min(CHECK_SAMPLES, len(clients.x)))
    x, y = clients.data.inputs(clients.x[rows], torch.float32), clients.y[rows]
    if (quiet := without_dropout(model, x)) is not None:
        model, program = quiet, Program(quiet, clients.data, loss)
    w = flatten(model)
    training = model.training
    model.train()
    output = model(x)
    gradients = torch.autograd.grad(loss(output, y), list(model.parameters()))
    model.train(training)
    exact = torch.cat([g.reshape(-1) for g in gradients])
    pool = program.pool(clients.x[rows])
    g, _ = program.train(w, pool, program.target(y), Plan([(rows, [len(rows)])], [0]), None, 1)
    for ours, theirs in ((program.predict(w, pool, 1), output.detach()), (g[0], exact)):
        if not torch.allclose(ours, theirs.reshape(ours.shape), rtol=0, atol=CHECK_TOLERANCE * float(theirs.abs().max().clamp_min(1e-6))):
            raise Unsupported("its compiled form disagrees with PyTorch on a test batch")


def _table(data: Data, channels: int) -> Tensor:
    """What each of the 256 byte values becomes, per channel, by the data's own formula."""
    shape = data.x_train.shape[1:]
    values = torch.arange(256, dtype=torch.uint8).view(256, *[1] * len(shape)).expand(256, *shape)
    inputs = data.inputs(values, torch.float32).reshape(256, channels, -1)
    if not torch.equal(inputs[:, :, :1].expand_as(inputs), inputs):
        raise Unsupported("its inputs are scaled differently within a channel")
    return inputs[:, :, 0].t().contiguous()


def _pointer(tensor: Tensor) -> int:
    return tensor.data_ptr()
