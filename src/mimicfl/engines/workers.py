"""The workers engine, for any module on a CPU: about one single-threaded process per core, which takes the next client when it is free.

Each round forks worker processes. They read the models, the data and the tasks without copying them, and write their updates to memory
that they share with the parent. Only the numbers of the jobs go through a pipe, so nothing is pickled, and a worker that crashes affects
only its round. If the parent dies, even if it is killed, its workers end as well.
"""

import copy
import ctypes
import faulthandler
import mmap
import os
import signal
import struct
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..clients.local_update import LocalResult
from ..clients.losses import Loss
from ..clients.params import Workspace, mix_in
from ..data.clients import Clients, Holdout
from ..data.samples import as_tensor
from .capabilities import Unsupported, unsupported_on_error
from .interface import ClientUpdates, TrainRequest
from .native.layers import LayerOverrides, Layers, compile_layers
from .native.workspace import CompiledWorkspace
from .plain import PlainEngine

JOB = struct.Struct("<i")
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of <malloc.h>
_SYSTEM = ctypes.CDLL(None) if sys.platform == "linux" else None  # opened before any fork

Pair = tuple[int, int]


class WorkersEngine:
    """Trains clients as the plain engine does, several in parallel."""

    name = label = "workers"
    room = None
    separates_runs = False

    def __init__(self, model: nn.Module, clients: Clients, loss: Loss, workers: int = 0) -> None:
        self.workers = workers or torch.get_num_threads()
        if clients.device.type != "cpu":
            raise Unsupported("worker processes run on the CPU only")
        if not hasattr(os, "fork") or sys.platform == "darwin":  # forking is not safe once Apple's libraries are loaded
            raise Unsupported("this system cannot fork")
        if self.workers < 2:
            raise Unsupported("there is only one core")
        if torch.cuda.is_available():  # PyTorch refuses backward passes in children that are forked after its first one
            raise Unsupported("PyTorch cannot train in worker processes while it sees a GPU; hide it with CUDA_VISIBLE_DEVICES=")
        self.plain = PlainEngine(model, clients, loss, compiled_workspace(model, clients))
        self.clients, self.loss = clients, loss
        module = self.plain.work.module
        layers = compile_layers(copy.deepcopy(module), clients, loss)  # a copy: recording the shapes must not change the buffers
        if (layers is None or layers.prefer_channels_last) and takes_channels_last(module, clients):
            module.register_forward_pre_hook(channels_last)
            layers = compile_layers(copy.deepcopy(module), clients, loss)  # the layout decides which layers are compiled
        if layers:
            if not isinstance(module, torch.jit.ScriptModule):  # nothing inside it can be replaced
                mix_in(module, type("WithLayers", (WithLayers,), {"layers": layers}))
            self.plain.loss = LossWithLayers(layers, loss)

    def like(self, model: nn.Module) -> "WorkersEngine":
        return WorkersEngine(model, self.clients, self.loss, self.workers)

    def train(self, requests: Sequence[TrainRequest]) -> list[ClientUpdates]:
        jobs = [(a, row) for a, request in enumerate(requests) for row in range(len(request.active))]
        jobs.sort(key=lambda job: -int(requests[job[0]].clients.sizes[requests[job[0]].active[job[1]]]))  # longest first
        updates = [Shared(request) for request in requests]
        read, write = os.pipe()
        error_read, error_write = os.pipe()
        children = [self._fork(requests, jobs, updates, (read, write), (error_read, error_write)) for _ in range(self.processes(len(jobs)))]
        os.close(read)
        os.close(error_write)
        with os.fdopen(write, "wb") as pipe:
            pipe.write(b"".join(JOB.pack(job) for job in range(len(jobs))))
        with os.fdopen(error_read, encoding="utf-8", errors="replace") as pipe:
            errors = pipe.read()
        failed = [status for status in (os.waitpid(child, 0)[1] for child in children) if status]
        if errors:
            raise RuntimeError(f"a worker process failed:\n{errors}")
        if any(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL for status in failed):
            raise MemoryError("a worker process was killed, most likely because memory ran out; use fewer threads or a smaller batch size")
        if failed:
            raise RuntimeError(f"a worker process crashed ({_exit_reason(failed[0])})")
        return [update.collected() for update in updates]

    def processes(self, jobs: int) -> int:
        """Return the number of processes: one per core, or up to about twice as many if that avoids idle cores at the end of a round."""
        tried = range(min(jobs, self.workers), min(jobs, 2 * self.workers + 1) + 1)
        return min(tried, key=lambda p: -(-jobs // p) * max(p, self.workers))

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> None:
        """Return None: the module itself, with all threads, is as fast."""

    def _fork(self, requests: Sequence[TrainRequest], jobs: list[Pair], updates: "list[Shared]", work: Pair, errors: Pair) -> int:
        parent = os.getpid()
        child = fork()
        if child:
            return child
        status = 1
        try:
            die_with_parent(parent)
            os.close(work[1])
            torch.set_num_threads(1)
            keep_memory()
            while os.getppid() == parent and len(number := os.read(work[0], JOB.size)) == JOB.size:
                a, row = jobs[JOB.unpack(number)[0]]
                result = self.plain.train_one(requests[a], row)
                updates[a].put(row, result, self.plain.work.buffers() if requests[a].buffers else {})
            status = 0
        except BaseException:
            os.write(errors[1], traceback.format_exc().encode())
        finally:
            os._exit(status)  # skip cleanup: all resources belong to the parent


def die_with_parent(parent: int) -> None:
    """Ask the system to end this process when its parent dies, since no one would read its results."""
    if _SYSTEM is not None:
        _SYSTEM.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def keep_memory() -> None:
    """Let this process keep what it frees: large tensors otherwise return to the system in every step, and come back page by page."""
    if _SYSTEM is not None and hasattr(_SYSTEM, "mallopt"):
        for option, size in ((M_MMAP_THRESHOLD, 1 << 30), (M_TRIM_THRESHOLD, (1 << 31) - 1), (M_TOP_PAD, 64 << 20)):
            _SYSTEM.mallopt(option, size)


def compiled_workspace(model: nn.Module, clients: Clients) -> Workspace | None:
    try:
        with unsupported_on_error():
            return CompiledWorkspace(model, clients.device)
    except Unsupported:
        return None


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which the children never use
        return os.fork()


def _exit_reason(status: int) -> str:
    """Describe how a process ended."""
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit code {os.waitstatus_to_exitcode(status)}"


def channels_last(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert images to channels-last layout, in which convolutions on a CPU are about 10 % faster; custom loops may pass other inputs."""
    if not (inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim == 4):
        return inputs
    x = inputs[0]
    c, h, w = x.shape[1:]
    last = x.contiguous(memory_format=torch.channels_last)
    return (last if c > 1 else last.as_strided(x.shape, (h * w, 1, w, 1)), *inputs[1:])  # the strides of one channel are ambiguous


class WithLayers:
    """Mixed in before a module's class: its forward pass uses compiled layers. So does that of a copy, which custom loops may make."""

    layers: ClassVar[Layers]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with LayerOverrides(self.layers):
            return super().forward(*inputs, **named)  # type: ignore[misc]


class LossWithLayers:
    """Calls a loss with compiled layers. Custom loops may read the attributes of the loss."""

    def __init__(self, layers: Layers, loss: Loss) -> None:
        self.__layers, self.__loss = layers, loss

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        with LayerOverrides(self.__layers):
            return self.__loss(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__loss, name)


def takes_channels_last(module: nn.Module, clients: Clients) -> bool:
    """Return whether the model has image convolutions and accepts channels-last inputs (`x.view(len(x), -1)`, for one, does not)."""
    if not isinstance(clients.x, Tensor) or clients.x.ndim != 4 or not any(isinstance(layer, nn.Conv2d) for layer in module.modules()):
        return False
    inputs = channels_last(module, (clients.inputs(slice(2)),))
    child = fork()  # tried in a child: PyTorch's backward pass crashes for some layers in this layout, such as GroupNorm on the inputs
    if child:
        return os.waitpid(child, 0)[1] == 0
    status = 1
    try:
        faulthandler.disable()  # a crash here is an answer, not an error to print
        torch.set_num_threads(1)
        as_tensor(module(*inputs)).sum().backward()
        status = 0
    finally:
        os._exit(status)


class Shared:
    """Client updates in memory that the parent and its workers share."""

    def __init__(self, request: TrainRequest) -> None:
        m = len(request.active)
        self.g = _shared((m, request.w.numel()), request.w.dtype)
        self.total = _shared((m,), request.w.dtype)
        self.steps = _shared((m,), torch.long)
        self.buffers = {name: _shared((m, *value.shape), value.dtype) for name, value in request.buffers.items()}
        self.sent = {name: _shared(self.g.shape, self.g.dtype) for name in request.instructions.send}

    def put(self, row: int, result: LocalResult, buffers: dict[str, Tensor]) -> None:
        self.g[row], self.total[row], self.steps[row] = result.g, result.total, result.steps
        for shared, values in ((self.buffers, buffers), (self.sent, result.sent)):
            for name, value in values.items():
                shared[name][row] = value

    def collected(self) -> ClientUpdates:
        return ClientUpdates(self.g, self.steps, self.total / self.steps.to(self.total.dtype), self.buffers, self.sent)


def _shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate zeros in anonymous memory that stays shared after a fork."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.zeros(shape, dtype=dtype)
    room = mmap.mmap(-1, count * torch.empty(0, dtype=dtype).element_size())
    return torch.frombuffer(room, dtype=dtype, count=count).view(shape)
