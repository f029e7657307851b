"""The native engine on a GPU: the same requests and updates as the plain engine; each client's local training is one block's work."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ....clients.losses import Loss
from ....clients.params import copy_sharing_frozen
from ....clients.train import draw
from ....data.clients import Clients, Holdout
from ....data.samples import single
from ...capabilities import Unsupported, unsupported_on_error
from ...interface import ClientUpdates, TrainRequest
from ...population import different, largest
from ..network import refuse_requests
from ..verify import verify
from .generate import EXTRAS
from .program import SENT, Batches, DeviceProgram

LANES = (8, 16, 32)  # samples that a block processes at once
USUAL = 16
Part = tuple[np.ndarray, list[int]]  # a client's samples in training order, and its batch sizes


class NativeGpuEngine:
    """Trains the clients of a round, of one or of many runs, in one launch: a client per multiprocessor.

    How many clients train together changes no bit, since a client's sums do not depend on where or beside whom it trains.
    """

    name = label = "native"
    room = None
    separates_runs = False

    @unsupported_on_error()
    def __init__(self, model: nn.Module, clients: Clients, loss: Loss) -> None:
        if clients.data.augment:
            raise Unsupported("its data is augmented")
        model = copy_sharing_frozen(model, clients.device)
        self.model, self.clients, self.loss = model, clients, loss
        self.programs: dict[tuple[int, frozenset[str]], DeviceProgram] = {}
        program = self._program(USUAL, frozenset(EXTRAS))
        self.pool, self.target = program.pool(single(clients.x)), program.target(single(clients.y))
        self.tests: tuple[Tensor, Tensor] | None = None  # the last test samples: as given, and converted for the compiled code
        verify(program, self._whole, model, clients, loss)

    def _whole(self, model: nn.Module) -> DeviceProgram:
        return DeviceProgram(model, self.clients.data, self.loss, USUAL, self.clients.device, frozenset(EXTRAS))

    def _program(self, lanes: int, extras: frozenset[str]) -> DeviceProgram:
        if (lanes, extras) not in self.programs:
            self.programs[lanes, extras] = DeviceProgram(self.model, self.clients.data, self.loss, lanes, self.clients.device, extras)
        return self.programs[lanes, extras]

    def like(self, model: nn.Module) -> "NativeGpuEngine":
        return NativeGpuEngine(model, self.clients, self.loss)

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        refuse_requests(requests, sends=True)
        if any(request.local.clip_norm for request in requests):
            raise Unsupported("its clients clip gradients, which native supports on a CPU only")
        found: dict[int, ClientUpdates] = {}
        batches = [largest(request.clients, request.local)[0] for request in requests]
        for lanes in sorted({_lanes(batch) for batch in batches}):  # a run's own batch size decides, so that other runs change no bit of it
            chosen = [k for k, batch in enumerate(batches) if _lanes(batch) == lanes]
            extras = frozenset().union(*[_extras(requests[k], batches[k] > lanes) for k in chosen])
            found |= zip(chosen, self._train([requests[k] for k in chosen], self._program(lanes, extras)), strict=True)
        return [found[k] for k in range(len(requests))]

    def _train(self, requests: list[TrainRequest], program: DeviceProgram) -> list[ClientUpdates]:
        parts: list[Part] = []
        clients, which = different(requests)
        for request, client in clients:
            sizes, order, _ = draw(request.clients, client, request.local, request.seed, (request.t, client))
            parts.append((request.clients.split[client][order], sizes))
        counts = [len(request.active) for request in requests]
        batches, steps = self._batches(requests, counts, parts, which, program)
        g, loss, sent = program.train(batches)
        K = program.on_device(steps, np.int64)
        columns = [rows.split(counts) for rows in (g, K, (loss / K).to(torch.float32))]
        vectors = {name: rows.split(counts) for name, rows in sent.items()}
        return [
            ClientUpdates(columns[0][k], columns[1][k], columns[2][k], sent={name: vectors[name][k] for name in request.instructions.send})
            for k, request in enumerate(requests)
        ]

    def _batches(
        self, requests: list[TrainRequest], counts: list[int], parts: list[Part], which: np.ndarray, program: DeviceProgram
    ) -> tuple[Batches, np.ndarray]:
        """The clients as tensors on the device, and the number of steps of each."""
        steps = np.array([len(sizes) for _, sizes in parts])
        begin = np.cumsum([0] + [len(rows) for rows, _ in parts])[:-1]
        first = np.cumsum(steps) - steps
        per_client = np.repeat(np.arange(len(requests)), counts)
        up = program.on_device
        batches = Batches(
            w0=torch.stack([request.w for request in requests]),
            model=up(per_client, np.int32),
            pool=self.pool,
            target=self.target,
            rows=up(np.concatenate([rows for rows, _ in parts]), np.int32),
            begin=up(begin[which], np.int64),
            sizes=up(np.concatenate([sizes for _, sizes in parts]), np.int32),
            step=up(np.stack([first[which], first[which] + steps[which]], axis=1), np.int64),
            shift=up(np.array(self._shifts(requests)), np.int64),
            **{name: up(np.array(values)[per_client], np.float32) for name, values in _rates(requests).items()},
        )
        return batches, steps[which]

    def _shifts(self, requests: list[TrainRequest]) -> list[int]:
        """The address of each client's shift; the tensors are kept until the next round."""
        self.shifts: list[Tensor] = []
        found = []
        for request in requests:
            given, m = request.instructions.shift, len(request.active)
            if not isinstance(given, Tensor) and not given:
                found += [0] * m
                continue
            rows = given if isinstance(given, Tensor) else request.w.new_full((1, len(request.w)), float(given)).expand(m, -1)
            rows = rows if rows.stride(1) == 1 else rows.contiguous()
            self.shifts.append(rows)
            found += [rows.data_ptr() + row * rows.stride(0) * rows.element_size() for row in range(m)]
        return found

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> Tensor | None:
        """Return the test outputs [r, n, outputs] of r models [r, d]; None for samples that the compiled code cannot read."""
        program = next(iter(self.programs.values()))
        if self.tests is None or self.tests[0] is not samples.x:
            try:
                self.tests = single(samples.x), program.pool(single(samples.x))
            except (Unsupported, TypeError):
                return None
        return program.evaluate(w, self.tests[1])


def _lanes(batch: int) -> int:
    return next((lanes for lanes in LANES if lanes >= batch), USUAL)


def _extras(request: TrainRequest, parts: bool) -> frozenset[str]:
    """What the local steps of these clients have besides the gradient."""
    given = request.instructions
    found = {"SHIFT": isinstance(given.shift, Tensor) or given.shift != 0, "PROX": given.mu != 0, "MOMENTUM": request.local.momentum != 0}
    found |= {"PARTS": parts, **{SENT[name]: True for name in given.send}}
    return frozenset(name for name, has in found.items() if has)


def _rates(requests: list[TrainRequest]) -> dict[str, list[float]]:
    return {
        "eta": [request.eta_L for request in requests],
        "mu": [request.instructions.mu for request in requests],
        "beta": [request.local.momentum for request in requests],
        "decay": [request.local.l2 for request in requests],
    }
