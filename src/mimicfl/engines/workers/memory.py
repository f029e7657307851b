"""Memory that a process shares with those it forks: the requests of a round and the clients' results."""

import ctypes
import json
import mmap
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...algorithms import Instructions
from ...clients.local_sgd import LocalSGD
from ...clients.local_update import LocalResult
from ...data.clients import Clients
from ..interface import ClientUpdates, TrainRequest

ALIGNMENT = 64  # bytes: a cache line
FLAGS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)  # memory that is never written to costs nothing
Shape = tuple[str, list[int]]  # the type and the shape of a tensor
Known = list[tuple[Clients, LocalSGD]]  # objects that the processes share since the fork


class Block:
    """A piece of anonymous memory. It is free while no tensor shows it."""

    def __init__(self, size: int) -> None:
        self.size, self.users = size, 0
        try:
            self.room = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=FLAGS)
        except OSError as error:
            raise MemoryError(f"no memory for {size / 1e9:.1f} GB of client updates") from error

    @property
    def free(self) -> bool:
        return not self.users

    def tensors(self, shapes: Sequence[Shape], begin: int = 0) -> list[Tensor]:
        """Show the memory from `begin` on as tensors of these shapes, one after the other."""
        view = (ctypes.c_char * self.size).from_buffer(self.room)  # an object of its own, which lives as long as a tensor uses it
        self.users += 1
        weakref.finalize(view, self._released).atexit = False
        found = []
        for dtype, shape in shapes:
            begin, count = aligned(begin), torch.Size(shape).numel()
            kind = getattr(torch, dtype)
            found.append(
                torch.frombuffer(view, dtype=kind, count=count, offset=begin).view(shape) if count else torch.zeros(shape, dtype=kind)
            )
            begin += count * kind.itemsize
        return found

    def _released(self) -> None:
        self.users -= 1


def aligned(begin: int) -> int:
    return -(-begin // ALIGNMENT) * ALIGNMENT


def room_for(shapes: Sequence[Shape]) -> int:
    """Return bytes that suffice for tensors of these shapes."""
    return sum(ALIGNMENT + torch.Size(shape).numel() * getattr(torch, dtype).itemsize for dtype, shape in shapes)


def shape_of(tensor: Tensor, *rows: int) -> Shape:
    """Return the type and shape of a tensor, or of several rows like it."""
    return str(tensor.dtype).removeprefix("torch."), [*rows, *tensor.shape]


@dataclass(frozen=True)
class Round:
    """The requests of a round as text and tensors."""

    text: bytes
    tensors: list[Tensor]
    inputs: list[Shape]
    outputs: list[Shape]

    @classmethod
    def of(cls, requests: Sequence[TrainRequest], known: Known) -> "Round":
        tensors: list[Tensor] = []
        described = []
        for request in requests:
            shift = request.instructions.shift
            rows = [shift if shift.stride(0) else shift[:1]] if isinstance(shift, Tensor) else []  # one row for all clients is sent once
            described.append(
                {
                    "t": request.t,
                    "active": request.active.tolist(),
                    "buffers": list(request.buffers),
                    "shift": None if rows else float(shift),
                    "mu": request.instructions.mu,
                    "send": list(request.instructions.send),
                    "eta_L": request.eta_L,
                    "seed": request.seed,
                    "known": index_of(known, request),
                }
            )
            tensors += [request.w, *request.buffers.values(), *rows]
        inputs = [shape_of(tensor) for tensor in tensors]
        outputs = [shape for request in requests for shape in results_of(request)]
        return cls(json.dumps([described, inputs, outputs]).encode(), tensors, inputs, outputs)

    @property
    def begin(self) -> int:
        """Where the tensors begin, after the text and its length."""
        return 8 + len(self.text)

    def write(self, block: Block) -> None:
        block.room[: self.begin] = len(self.text).to_bytes(8, "little") + self.text
        for place, tensor in zip(block.tensors(self.inputs, self.begin), self.tensors, strict=True):
            place.copy_(tensor)


def read_round(block: Block, results: Block, known: Known) -> "tuple[list[TrainRequest], list[Results]]":
    """Return the requests of a round, whose tensors lie in `block`, and the places of their results."""
    length = int.from_bytes(block.room[:8], "little")
    described, inputs, outputs = json.loads(block.room[8 : 8 + length])
    tensors, places = iter(block.tensors(inputs, 8 + length)), iter(results.tensors(outputs))
    requests = [_request(each, tensors, known) for each in described]
    return requests, [Results.of(request, places) for request in requests]


def _request(given: dict[str, Any], tensors: Iterator[Tensor], known: Known) -> TrainRequest:
    active, (clients, local) = np.array(given["active"], dtype=np.int64), known[given["known"]]
    w = next(tensors)
    buffers = {name: next(tensors) for name in given["buffers"]}
    shift = next(tensors).expand(len(active), -1) if given["shift"] is None else given["shift"]
    instructions = Instructions(shift, given["mu"], send=tuple(given["send"]))
    share = torch.zeros(len(active))  # only the server uses it, as eta
    return TrainRequest(given["t"], active, share, w, buffers, instructions, given["eta_L"], 0.0, clients, local, given["seed"])


def index_of(known: Known, request: TrainRequest) -> int:
    """Return the place of the request's objects among those that the processes share; -1 if they are new."""
    same = (k for k, (clients, local) in enumerate(known) if clients is request.clients and local is request.local)
    return next(same, -1)


def results_of(request: TrainRequest) -> list[Shape]:
    """Return the shapes of a request's results, in the order of `Results`."""
    m, kind = len(request.active), shape_of(request.w)[0]
    vectors = [shape_of(request.w, m)] * (1 + len(request.instructions.send))
    return [(kind, [m]), ("int64", [m]), *vectors, *(shape_of(value, m) for value in request.buffers.values())]


@dataclass(frozen=True)
class Results:
    """The results of the clients of a request; rows follow `active`."""

    total: Tensor
    steps: Tensor
    g: Tensor
    sent: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, request: TrainRequest, places: Iterator[Tensor]) -> "Results":
        total, steps, g = next(places), next(places), next(places)
        sent = {name: next(places) for name in request.instructions.send}
        return cls(total, steps, g, sent, {name: next(places) for name in request.buffers})

    def put(self, row: int, result: LocalResult, buffers: dict[str, Tensor]) -> None:
        self.g[row], self.total[row], self.steps[row] = result.g, result.total, result.steps
        for shared, values in ((self.buffers, buffers), (self.sent, result.sent)):
            for name, value in values.items():
                shared[name][row] = value

    def collected(self) -> ClientUpdates:
        return ClientUpdates(self.g, self.steps, self.total / self.steps.to(self.total.dtype), self.buffers, self.sent)
