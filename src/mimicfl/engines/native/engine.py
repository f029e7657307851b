"""The native engine: the same requests and updates as the plain engine, in compiled code, with one client per thread."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ...clients.losses import Loss
from ...clients.train import draw
from ...data.clients import Clients, Holdout
from ...data.dataset import Data
from ...data.samples import single
from ...seeds import number
from ..capabilities import Unsupported, unsupported_on_error
from ..interface import ClientUpdates, TrainRequest
from ..parallel import clients_at_once
from .build import open_library
from .generate import generate
from .network import Network, floats, refuse_requests
from .verify import verify

Part = tuple[np.ndarray, list[int]]  # a client's samples in training order, and its batch sizes
Floats = Sequence[float]
Shifts = Sequence[Tensor | None]  # one per client


class Program(Network):
    """A compiled network with a loss."""

    @unsupported_on_error()
    def __init__(self, model: nn.Module, data: Data, loss: Loss, flags: tuple[str, ...] = ()) -> None:
        super().__init__(model, data, loss)
        self.source = generate(self.layers, self.dimension, self.kind, self.uint8)
        self.code = open_library(self.source, flags)

    def predict(self, w: Tensor, pool: Tensor, threads: int) -> Tensor:
        """Return the outputs [n, outputs] in evaluation mode."""
        out = floats(len(pool), self.outputs)
        w = w.contiguous()
        failed = self.code.mimicfl_outputs(_pointer(w), _pointer(pool), _pointer(self.table), len(pool), _pointer(out), threads)
        if failed:
            raise MemoryError("the native engine could not allocate its workspace")
        return out

    def train(self, w: Tensor, pool: Tensor, target: Tensor, batches: "Batches", shifts: Shifts, threads: int) -> tuple[Tensor, Tensor]:
        """Train one round; return g [m, d] and the summed batch losses [m].

        w is [d], or [models, d] with the index of each client's model in `batches.model`.
        """
        m = len(batches.begin)
        g = floats(m, w.shape[-1])
        loss = np.empty(m)
        w = w.contiguous()
        shifts = [shift if shift is None else shift.contiguous() for shift in shifts]  # keeps them alive while the compiled code reads them
        shift = np.array([0 if shift is None else _pointer(shift) for shift in shifts], dtype=np.uintp)
        arrays: list[np.ndarray] = [batches.rows, batches.begin, batches.sizes, batches.step]
        failed = self.code.mimicfl_train(
            *[_pointer(w), batches.model.ctypes.data, _pointer(g), loss.ctypes.data],
            *[_pointer(pool), _pointer(self.table), _pointer(target), *[array.ctypes.data for array in arrays]],
            *[shift.ctypes.data, batches.keys.ctypes.data, batches.eta.ctypes.data, batches.mu.ctypes.data],
            *[batches.momentum.ctypes.data, batches.clip.ctypes.data, batches.order.ctypes.data, m, threads],
        )
        if failed:
            raise MemoryError("the native engine could not allocate its workspace")
        return g, torch.from_numpy(loss)

    def step(self, w: Tensor, pool: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient [d] and the loss [1] of all these samples as one batch."""
        g, loss = self.train(w, pool, target, Batches([(np.arange(len(pool)), [len(pool)])], [0]), [None], 1)
        return g[0], loss


class Batches:
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
        self.order = np.argsort([-len(rows) for rows, _ in parts], kind="stable").astype(np.int32)  # longest first
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
        refuse_requests(requests)
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
            given = request.instructions.shift
            constant = request.w.new_full(request.w.shape, float(given)) if not isinstance(given, Tensor) and given else None
            shifts.append(given[row] if isinstance(given, Tensor) else constant)
        assert pool is not None
        per_client = [requests[a] for a, _ in jobs]
        rates = ([request.eta_L for request in per_client], [request.instructions.mu for request in per_client])
        terms = ([request.local.momentum for request in per_client], [request.local.clip_norm for request in per_client])
        batches = Batches(parts, keys, *rates, *terms, [a for a, _ in jobs])
        w = torch.stack([request.w for request in requests])
        threads = clients_at_once(len(jobs), torch.get_num_threads())
        g, loss = self.program.train(w, pool, target, batches, shifts, threads)
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


def _pointer(tensor: Tensor) -> int:
    return tensor.data_ptr()
