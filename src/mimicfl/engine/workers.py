"""The workers cohort, for any module on a CPU: about one process a core, each with one thread, clients handed out as cores get free.

A round forks: the children see models, data and tasks where they lie, without a copy, and write their answers into memory they
share with the parent. Nothing is sent but a job's number down a pipe, so nothing has to be packed, and a child that dies takes
only its round with it. A parent that dies, however it is killed, takes its children with it.
"""

import copy
import ctypes
import mmap
import os
import signal
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..data.clients import Clients, Holdout
from ..local.losses import Loss
from .cohort import Answers, Ask, PlainCohort
from .native.layers import Layers, Quick, quick_layers
from .support import Unsupported

JOB = struct.Struct("<i")
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_SYSTEM = ctypes.CDLL(None) if sys.platform == "linux" else None  # opened before any fork


class WorkersCohort:
    """Trains clients as the plain cohort does, several at a time."""

    name = label = "workers"
    room = None

    def __init__(self, model: nn.Module, clients: Clients, loss: Loss, workers: int = 0) -> None:
        self.workers = workers or torch.get_num_threads()
        if clients.device.type != "cpu":
            raise Unsupported("worker processes run on the CPU only")
        if not hasattr(os, "fork") or sys.platform == "darwin":  # forking a process with Apple's libraries in it is not safe
            raise Unsupported("this system cannot fork")
        if self.workers < 2:
            raise Unsupported("there is only one core")
        self.plain = PlainCohort(model, clients, loss)
        self.clients, self.loss = clients, loss
        module = self.plain.work.module
        if layers := quick_layers(copy.deepcopy(module), clients):  # a copy: looking must not move its buffers
            forward = module.forward
            module.forward = lambda *inputs: _quickly(layers, forward, inputs)
        elif takes_channels_last(module, clients):
            module.register_forward_pre_hook(channels_last)

    def like(self, model: nn.Module) -> "WorkersCohort":
        return WorkersCohort(model, self.clients, self.loss, self.workers)

    def train(self, asks: Sequence[Ask]) -> list[Answers]:
        jobs = [(a, row) for a, ask in enumerate(asks) for row in range(len(ask.active))]
        jobs.sort(key=lambda job: -int(asks[job[0]].clients.sizes[asks[job[0]].active[job[1]]]))  # the longest first
        answers = [Shared(ask) for ask in asks]
        read, write = os.pipe()
        said, saying = os.pipe()
        children = [self._fork(asks, jobs, answers, (read, write), (said, saying)) for _ in range(self.processes(len(jobs)))]
        os.close(read)
        os.close(saying)
        with os.fdopen(write, "wb") as pipe:
            pipe.write(b"".join(JOB.pack(job) for job in range(len(jobs))))
        with os.fdopen(said, encoding="utf-8", errors="replace") as pipe:
            trouble = pipe.read()
        died = [status for status in (os.waitpid(child, 0)[1] for child in children) if status]
        if trouble:
            raise RuntimeError(f"a worker process failed:\n{trouble}")
        if any(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL for status in died):
            raise MemoryError("a worker process was killed, most likely for want of memory: use fewer threads or smaller numbers")
        if died:
            raise RuntimeError(f"a worker process crashed ({_ended(died[0])})")
        return [answer.collected() for answer in answers]

    def processes(self, jobs: int) -> int:
        """As many as cores, or up to about twice as many where the system, sharing the cores out, then leaves none idle at the end."""
        tried = range(min(jobs, self.workers), min(jobs, 2 * self.workers + 1) + 1)
        return min(tried, key=lambda p: -(-jobs // p) * max(p, self.workers))

    def outputs(self, w: Tensor, buffers: Sequence[dict[str, Tensor]], samples: Holdout) -> None:
        """No faster way to the outputs than the module itself, with all threads."""

    def _fork(
        self, asks: Sequence[Ask], jobs: list[tuple[int, int]], answers: "list[Shared]", work: tuple[int, int], words: tuple[int, int]
    ) -> int:
        parent = os.getpid()
        child = fork()
        if child:
            return child
        status = 1
        try:
            end_with(parent)
            os.close(work[1])
            torch.set_num_threads(1)
            while os.getppid() == parent and len(number := os.read(work[0], JOB.size)) == JOB.size:
                a, row = jobs[JOB.unpack(number)[0]]
                answers[a].put(row, *self.plain.train_one(asks[a], row), self.plain.work.buffers() if asks[a].buffers else {})
            status = 0
        except BaseException:
            os.write(words[1], traceback.format_exc().encode())
        finally:
            os._exit(status)  # no cleaning up: everything belongs to the parent


def end_with(parent: int) -> None:
    """Have the system end this process when its parent dies: nobody would read its results."""
    if _SYSTEM is not None:
        _SYSTEM.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: the children never use theirs
        return os.fork()


def _ended(status: int) -> str:
    """How a process ended, in words."""
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit code {os.waitstatus_to_exitcode(status)}"


def channels_last(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Images with the channels innermost, for which the CPU's convolutions are about a tenth faster."""
    x = inputs[0]
    c, h, w = x.shape[1:]
    last = x.contiguous(memory_format=torch.channels_last)
    return (last if c > 1 else last.as_strided(x.shape, (h * w, 1, w, 1)), *inputs[1:])  # one channel could be read either way: say which


def _quickly(layers: Layers, forward: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    with Quick(layers):
        return forward(*inputs)


def takes_channels_last(module: nn.Module, clients: Clients) -> bool:
    """Are there convolutions of images, and does the model read them in any layout? (`x.view(len(x), -1)` does not.)"""
    if clients.x.ndim != 4 or not any(isinstance(layer, nn.Conv2d) for layer in module.modules()):
        return False
    inputs = channels_last(module, (clients.data.inputs(clients.x[:2].clone(), clients.dtype),))
    child = fork()  # PyTorch's backward pass crashes on some layers in this layout, such as a GroupNorm of the images themselves
    if child:
        return os.waitpid(child, 0)[1] == 0
    status = 1
    try:
        torch.set_num_threads(1)
        module(*inputs).sum().backward()
        status = 0
    finally:
        os._exit(status)


class Shared:
    """Answers in memory that parent and children share."""

    def __init__(self, ask: Ask) -> None:
        m = len(ask.active)
        self.g = _shared((m, ask.w.numel()), ask.w.dtype)
        self.total = _shared((m,), ask.w.dtype)
        self.steps = _shared((m,), torch.long)
        self.buffers = {name: _shared((m, *value.shape), value.dtype) for name, value in ask.buffers.items()}

    def put(self, row: int, g: Tensor, total: Tensor, steps: int, buffers: dict[str, Tensor]) -> None:
        self.g[row], self.total[row], self.steps[row] = g, total, steps
        for name, value in buffers.items():
            self.buffers[name][row] = value

    def collected(self) -> Answers:
        return Answers(self.g, self.steps, self.total / self.steps.to(self.total.dtype), self.buffers)


def _shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in anonymous memory that survives a fork as one memory, not as two."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.zeros(shape, dtype=dtype)
    room = mmap.mmap(-1, count * torch.empty(0, dtype=dtype).element_size())
    return torch.frombuffer(room, dtype=dtype, count=count).view(shape)
