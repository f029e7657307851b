"""The native cohort: same questions and answers as the plain one, in compiled code, one client per thread at a time."""

import copy
import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.clients import Clients, Holdout
from ...data.dataset import Data, random_moves
from ...errors import Diverged
from ...local.losses import LOSSES, Loss
from ...local.update import LocalSGD
from ...params import flatten
from ...seeds import stream
from ..cohort import Answers, Ask
from .build import open_library
from .generate import generate
from .trace import Unsupported, trace

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

    def train(
        self, w: Tensor, pool: Tensor, target: Tensor, plan: "Plan", shift: Tensor | None, mu: float, eta: float, threads: int
    ) -> tuple[Tensor, Tensor]:
        """g [m, d] and the summed batch losses [m] of one round."""
        m = len(plan.begin)
        g = torch.empty(m, w.numel())
        loss = np.empty(m)
        w = w.contiguous()
        shift = None if shift is None else shift.contiguous()
        arrays: list[np.ndarray] = [plan.rows, plan.begin, plan.sizes, plan.step]
        failed = self.code.mimicfl_train(
            *[_pointer(w), _pointer(g), loss.ctypes.data, _pointer(pool), _pointer(self.table), _pointer(target)],
            *[array.ctypes.data for array in arrays],
            *[None if shift is None else _pointer(shift), plan.keys.ctypes.data, eta, mu, m, threads],
        )
        if failed:
            raise MemoryError("the native engine could not allocate its workspace")
        return g, torch.from_numpy(loss)


class Plan:
    """Which samples each client takes in which step, end to end as the compiled code wants them."""

    def __init__(self, parts: list[tuple[np.ndarray, list[int]]], keys: list[int]) -> None:
        self.rows = np.ascontiguousarray(np.concatenate([rows for rows, _ in parts]), dtype=np.int64)
        self.begin = np.cumsum([0] + [len(rows) for rows, _ in parts])[:-1].astype(np.int64)
        self.sizes = np.concatenate([sizes for _, sizes in parts]).astype(np.int32)
        self.step = np.cumsum([0] + [len(sizes) for _, sizes in parts]).astype(np.int64)
        self.keys = np.array(keys, dtype=np.uint64)


class NativeCohort:
    """Trains the clients of a round in compiled code."""

    name = "native"

    def __init__(self, model: nn.Module, clients: Clients, local: LocalSGD, loss: Loss, flags: tuple[str, ...] = ()) -> None:
        if clients.device.type != "cpu":
            raise Unsupported("it runs on the CPU only")
        self.clients, self.local = clients, local
        self.program = Program(model, clients.data, loss, flags)
        self.target = self.program.target(clients.y)
        self.pool = None if clients.data.augment else self.program.pool(clients.x)
        check(self.program, model, clients, loss)

    def train(self, ask: Ask) -> Answers:
        if self.clients.data.augment:  # augmented batches exist only for their client: one at a time
            answers = [self._train(ask, [row]) for row in range(len(ask.active))]
            g, K, loss = (torch.cat([getattr(a, name) for a in answers]) for name in ("g", "K", "loss"))
        else:
            a = self._train(ask, list(range(len(ask.active))))
            g, K, loss = a.g, a.K, a.loss
        good = torch.isfinite(loss) & torch.isfinite(g).all(dim=1)
        if not bool(good.all()):
            client = int(ask.active[int((~good).nonzero()[0])])
            raise Diverged(f"the training loss is no longer finite in round {ask.t} at client {client} (local rate {ask.eta_L:g})")
        return Answers(g, K, loss)

    def _train(self, ask: Ask, chosen: list[int]) -> Answers:
        parts, pool, target = [], self.pool, self.target
        clients = [int(ask.active[row]) for row in chosen]
        for client in clients:
            count = int(self.clients.sizes[client])
            sizes = self.local.batch_sizes(count)
            order = self.local.order(count, sizes, stream(ask.seed, "batches", ask.t, client))
            rows = self.clients.split[client][order]
            if pool is None:
                moves = random_moves(len(order), stream(ask.seed, "augment", ask.t, client))
                x, y = zip(*self.clients.batches(client, order, sizes, moves), strict=True)
                pool, target, rows = torch.cat(x).contiguous(), self.program.target(torch.cat(y)), np.arange(len(order))
            parts.append((rows, sizes))
        assert pool is not None
        shift = ask.task.shift[chosen] if isinstance(ask.task.shift, Tensor) else None
        if shift is None and ask.task.shift:
            shift = torch.full((len(chosen), ask.w.numel()), float(ask.task.shift))
        plan = Plan(parts, [_key(ask.seed, ask.t, client) for client in clients])
        g, loss = self.program.train(ask.w, pool, target, plan, shift, float(ask.task.mu), ask.eta_L, torch.get_num_threads())
        steps = torch.tensor([len(sizes) for _, sizes in parts])
        return Answers(g, steps, (loss / steps).to(torch.float32))

    def predictor(self, samples: Holdout) -> Callable[[Tensor], Tensor]:
        """A function from parameters to the outputs for all these samples."""
        pool = self.program.pool(samples.x)
        return lambda w: self.program.predict(w, pool, torch.get_num_threads())


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
    if any(layer.kind == "dropout" for layer in program.layers):
        model = _without_dropout(model)
        program = Program(model, clients.data, loss)
    rows = np.arange(min(CHECK_SAMPLES, len(clients.x)))
    x, y = clients.data.inputs(clients.x[rows], torch.float32), clients.y[rows]
    w = flatten(model)
    training = model.training
    model.train()
    output = model(x)
    gradients = torch.autograd.grad(loss(output, y), list(model.parameters()))
    model.train(training)
    exact = torch.cat([g.reshape(-1) for g in gradients])
    pool = program.pool(clients.x[rows])
    g, _ = program.train(w, pool, program.target(y), Plan([(rows, [len(rows)])], [0]), None, 0.0, 0.0, 1)
    for ours, theirs in ((program.predict(w, pool, 1), output.detach()), (g[0], exact)):
        if not torch.allclose(ours, theirs.reshape(ours.shape), rtol=0, atol=CHECK_TOLERANCE * float(theirs.abs().max().clamp_min(1e-6))):
            raise Unsupported("its compiled form disagrees with PyTorch on a test batch")


def _without_dropout(model: nn.Module) -> nn.Module:
    plain = copy.deepcopy(model)
    for layer in plain.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return plain


def _table(data: Data, channels: int) -> Tensor:
    """What each of the 256 byte values becomes, per channel, by the data's own formula."""
    shape = data.x_train.shape[1:]
    values = torch.arange(256, dtype=torch.uint8).view(256, *[1] * len(shape)).expand(256, *shape)
    inputs = data.inputs(values, torch.float32).reshape(256, channels, -1)
    if not torch.equal(inputs[:, :, :1].expand_as(inputs), inputs):
        raise Unsupported("its inputs are scaled differently within a channel")
    return inputs[:, :, 0].t().contiguous()


def _key(seed: int, t: int, client: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:layers:{t}:{client}".encode(), digest_size=8).digest(), "little")


def _pointer(tensor: Tensor) -> int:
    return tensor.data_ptr()
