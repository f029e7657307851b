"""The native engine: the same requests and updates as the plain engine, in compiled code, with one client per thread."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ...clients.losses import Loss
from ...clients.params import flatten
from ...clients.train import draw
from ...data.clients import Clients, Holdout
from ...data.dataset import Data
from ...data.samples import single
from ...seeds import number
from ..capabilities import Unsupported, refuse_transform, unsupported_on_error
from ..interface import ClientUpdates, TrainRequest
from .build import open_library
from .generate import generate
from .trace import trace
from .verify import loss_name, verify

Part = tuple[np.ndarray, list[int]]  # a client's samples in training order, and its batch sizes
Floats = Sequence[float]
Shifts = Sequence[Tensor | None]  # one per client
MOST_OUTPUTS = 1 << 16  # the loss keeps one sample's outputs on the stack


class Program:
    """A compiled network with a loss."""

    @unsupported_on_error()
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
        """Check the sizes of outputs and targets, because the compiled loss has no bounds checks."""
        if self.outputs > MOST_OUTPUTS:
            raise Unsupported(f"it has more than {MOST_OUTPUTS} outputs")
        if self.kind == "cross-entropy" and data.num_classes > self.outputs:
            raise Unsupported("it has fewer outputs than classes")
        if self.kind == "mse" and (targets := math.prod(data.y_train.shape[1:])) != self.outputs:
            raise Unsupported(f"it has {self.outputs} outputs but {targets} targets per sample")

    def pool(self, x: Tensor) -> Tensor:
        """Convert samples to the form that the compiled code reads: uint8 as stored, anything else as float32 inputs."""
        pool = x if self.uint8 else self.data.inputs(x, torch.float32)
        if pool.dtype != (torch.uint8 if self.uint8 else torch.float32) or x.shape[1:] != self.data.x_train.shape[1:]:
            raise Unsupported(f"it was not compiled for samples of type {_name(x)} and shape {list(x.shape[1:])}")
        return pool.contiguous()

    def target(self, y: Tensor) -> Tensor:
        return (y.long() if self.kind == "cross-entropy" else y.float()).contiguous()

    def predict(self, w: Tensor, pool: Tensor, threads: int) -> Tensor:
        """Return the outputs [n, outputs] in evaluation mode."""
        out = _floats(len(pool), self.outputs)
        w = w.contiguous()
        failed = self.code.mimicfl_outputs(_pointer(w), _pointer(pool), _pointer(self.table), len(pool), _pointer(out), threads)
        if failed:
            raise MemoryError("the native engine could not allocate its workspace")
        return out

    def train(self, w: Tensor, pool: Tensor, target: Tensor, plan: "Plan", shifts: Shifts, threads: int) -> tuple[Tensor, Tensor]:
        """Train one round; return g [m, d] and the summed batch losses [m].

        w is [d], or [models, d] with the index of each client's model in `plan.model`.
        """
        m = len(plan.begin)
        g = _floats(m, w.shape[-1])
        loss = np.empty(m)
        w = w.contiguous()
        shifts = [shift if shift is None else shift.contiguous() for shift in shifts]  # keeps them alive while the compiled code reads them
        shift = np.array([0 if shift is None else _pointer(shift) for shift in shifts], dtype=np.uintp)
        arrays: list[np.ndarray] = [plan.rows, plan.begin, plan.sizes, plan.step]
        failed = self.code.mimicfl_train(
            *[_pointer(w), plan.model.ctypes.data, _pointer(g), loss.ctypes.data],
            *[_pointer(pool), _pointer(self.table), _pointer(target), *[array.ctypes.data for array in arrays]],
            *[shift.ctypes.data, plan.keys.ctypes.data, plan.eta.ctypes.data, plan.mu.ctypes.data],
            *[plan.momentum.ctypes.data, plan.clip.ctypes.data, m, threads],
        )
        if failed:
            raise MemoryError("the native engine could not allocate its workspace")
        return g, torch.from_numpy(loss)

    def step(self, w: Tensor, pool: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient [d] and the loss [1] of all these samples as one batch."""
        g, loss = self.train(w, pool, target, Plan([(np.arange(len(pool)), [len(pool)])], [0]), [None], 1)
        return g[0], loss


class Plan:
    """The samples of every step of every client, concatenated as the compiled code expects, with the clients' rates and models."""

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


class NativeEngine:
    """Trains the clients of a round in compiled code; clients of several runs train in parallel."""

    name = label = "native"
    room = None
    separates_runs = False

    @unsupported_on_error()
    def __init__(self, model: nn.Module, clients: Clients, loss: Loss, flags: tuple[str, ...] = ()) -> None:
        if clients.device.type != "cpu":
            raise Unsupported("it runs on the CPU only")
        self.clients, self.loss = clients, loss
        self.program = Program(model, clients.data, loss, flags)
        self.target = self.program.target(single(clients.y))
        self.pool = None if clients.data.augment else self.program.pool(single(clients.x))
        self.tests: tuple[Tensor, Tensor] | None = None  # the last test samples: as given, and converted for the compiled code
        verify(self.program, lambda other: Program(other, clients.data, loss, flags), model, clients, loss)

    def like(self, model: nn.Module) -> "NativeEngine":
        return NativeEngine(model, self.clients, self.loss)

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        if sent := [name for request in requests for name in request.task.send]:
            raise Unsupported(f"clients of its algorithm also send {sent[0]}")
        for local in {id(request.local): request.local for request in requests}.values():
            if local.rule is not None or local.lr_multipliers:
                raise Unsupported(f"its clients train with {local.extras[-1]}, compiled code only with SGD and momentum")
        jobs = [(a, row) for a, request in enumerate(requests) for row in range(len(request.active))]
        # Augmented batches are created per client, so these clients train one at a time.
        parts = [self._train(requests, part) for part in ([jobs] if self.pool is not None else [[job] for job in jobs])]
        g, K, loss = (torch.cat([getattr(part, name) for part in parts]) for name in ("g", "K", "loss"))
        cut = [len(request.active) for request in requests]
        return [ClientUpdates(*rows) for rows in zip(g.split(cut), K.split(cut), loss.split(cut), strict=True)]

    def _train(self, requests: Sequence[TrainRequest], jobs: list[tuple[int, int]]) -> ClientUpdates:
        parts: list[Part] = []
        keys: list[int] = []
        shifts: list[Tensor | None] = []
        pool, target = self.pool, self.target
        for request, row in [(requests[a], row) for a, row in jobs]:
            client, clients = int(request.active[row]), request.clients
            sizes, order, moves = draw(clients, client, request.local, request.seed, (request.t, client))
            rows = clients.split[client][order]
            if pool is None:
                x, y = zip(*clients.batches(client, order, sizes, moves), strict=True)
                pool, target, rows = torch.cat(x).contiguous(), self.program.target(torch.cat(y)), np.arange(len(order))
            parts.append((rows, sizes))
            keys.append(number(request.seed, "layers", request.t, client))
            given = request.task.shift
            constant = request.w.new_full(request.w.shape, float(given)) if not isinstance(given, Tensor) and given else None
            shifts.append(given[row] if isinstance(given, Tensor) else constant)
        assert pool is not None
        per_client = [requests[a] for a, _ in jobs]
        rates = ([request.eta_L for request in per_client], [request.task.mu for request in per_client])
        terms = ([request.local.momentum for request in per_client], [request.local.clip_norm for request in per_client])
        plan = Plan(parts, keys, *rates, *terms, [a for a, _ in jobs])
        w = torch.stack([request.w for request in requests])
        g, loss = self.program.train(w, pool, target, plan, shifts, torch.get_num_threads())
        steps = torch.tensor([len(sizes) for _, sizes in parts])
        return ClientUpdates(g, steps, (loss / steps).to(torch.float32))

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> Tensor | None:
        """Return the test outputs [r, n, outputs] of r models [r, d]; None for samples that the compiled code cannot read."""
        if self.tests is None or self.tests[0] is not samples.x:
            try:
                self.tests = single(samples.x), self.program.pool(single(samples.x))
            except (Unsupported, TypeError):
                return None
        return torch.stack([self.program.predict(one, self.tests[1], torch.get_num_threads()) for one in w])


def _check_inputs(data: Data) -> None:
    refuse_transform(data)
    if not isinstance(data.x_train, Tensor) or not isinstance(data.y_train, Tensor):
        raise Unsupported("its samples are not single tensors")
    for x in (data.x_train, data.x_test):
        if x.dtype != torch.uint8 and not x.is_floating_point():
            raise Unsupported(f"its inputs are {_name(x)}")
    if (data.x_train.dtype == torch.uint8) != (data.x_test.dtype == torch.uint8):
        raise Unsupported(f"its training samples are {_name(data.x_train)} and its test samples {_name(data.x_test)}")


def _table(data: Data, channels: int) -> Tensor:
    """Return the input value of each of the 256 byte values, per channel, computed with the dataset's formula."""
    shape = data.x_train.shape[1:]
    values = torch.arange(256, dtype=torch.uint8).view(256, *[1] * len(shape)).expand(256, *shape)
    inputs = data.inputs(values, torch.float32).reshape(256, channels, -1)
    if not torch.equal(inputs[:, :, :1].expand_as(inputs), inputs):
        raise Unsupported("its inputs are scaled differently within a channel")
    return inputs[:, :, 0].t().contiguous()


def _floats(*shape: int) -> Tensor:
    """Allocate memory for the compiled code to fill, independent of PyTorch's default type and device."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _pointer(tensor: Tensor) -> int:
    return tensor.data_ptr()
