"""A crew: worker processes that train the clients of one round after another.

A process is a copy of its parent at the fork, so it sees no later change of the objects that they share. The engine starts a new crew if
one of these has changed; a worker in which one has changed (a model that counts its calls) is replaced before the next round. What a worker
does to its copies therefore ends with the round, as if it had been forked for it.

Parent and workers exchange numbers through pipes and tensors through shared memory; nothing is pickled. A crew belongs to the thread that
began it: the system ends its workers with that thread, and a process forked from this one would write to the same memory.
"""

import contextlib
import os
import select
import signal
import struct
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..interface import ClientUpdates, TrainRequest
from ..plain import PlainEngine
from .memory import Block, Known, Results, Round, read_round, room_for
from .process import die_with_parent, exit_reason, fork, keep_memory, leave_signals_to_parent

JOB = struct.Struct("<qiii")  # number of the round, block of its results, request, row
REPORT = struct.Struct("<ci")  # what happened, and the length of the text that follows
DONE, CHANGED, FAILED = b"d", b"c", b"f"
BLOCKS = 3  # of results: those of the last round are still in use while the next one trains
SPARE = 1 << 28  # bytes that a block has at most for rounds larger than the first
Job = tuple[int, int]  # request and row


@dataclass(frozen=True)
class Process:
    """A worker, as its parent sees it."""

    pid: int
    jobs: int  # the end of a pipe for `JOB`
    reports: int

    def give(self, round: int, block: int, job: Job) -> None:
        os.write(self.jobs, JOB.pack(round, block, *job))

    def report(self) -> tuple[bytes, str]:
        """Return what happened and its text. No bytes: the process has ended."""
        begin = _read(self.reports, REPORT.size)
        if len(begin) < REPORT.size:
            return b"", ""
        kind, length = REPORT.unpack(begin)
        return kind, _read(self.reports, length).decode(errors="replace")

    def end(self) -> int:
        """End the process, which owns nothing, and return its status."""
        status = 0
        with contextlib.suppress(ChildProcessError):  # somebody has waited for it, and its number may be another process's now
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if not pid:
                os.kill(self.pid, signal.SIGKILL)
                status = os.waitpid(self.pid, 0)[1]
        for end in (self.jobs, self.reports):
            os.close(end)
        return status


class Crew:
    """Workers that share `engine`, the objects in `known` and blocks of memory. `restamp` describes the shared objects by value."""

    def __init__(self, engine: PlainEngine, known: Known, restamp: Callable[[], str], first: Round) -> None:
        self.engine, self.known, self.stamp, self.restamp = engine, known, restamp(), restamp
        self.inputs = Block(_with_spare(first.begin + room_for(first.inputs)))
        self.results = [Block(_with_spare(room_for(first.outputs))) for _ in range(BLOCKS)]
        self.processes: list[Process] = []
        self.rounds, self.thread = 0, threading.get_native_id()  # a number that is unique among all processes
        self.end = weakref.finalize(self, _end, self.processes, os.getpid())  # called at the latest when nobody needs the crew

    @property
    def is_ours(self) -> bool:
        """Return whether this thread began the crew."""
        return self.thread == threading.get_native_id()

    def has_room(self, round: Round) -> bool:
        size = room_for(round.outputs)
        return round.begin + room_for(round.inputs) <= self.inputs.size and any(each.free and size <= each.size for each in self.results)

    def train(self, round: Round, requests: Sequence[TrainRequest], jobs: Sequence[Job], count: int) -> list[ClientUpdates]:
        """Train with `count` processes. A crew that raises an exception must be ended."""
        block = next(k for k, each in enumerate(self.results) if each.free)
        places = iter(self.results[block].tensors(round.outputs))
        results = [Results.of(request, places) for request in requests]
        round.write(self.inputs)
        self.rounds += 1
        self._replace_ended()
        while len(self.processes) < count:
            self.processes.append(self._start())
        self._train_jobs(block, deque(jobs), self.processes[:count])
        return [each.collected() for each in results]

    def _train_jobs(self, block: int, waiting: deque[Job], free: list[Process]) -> None:
        busy: dict[int, tuple[Process, Job]] = {}
        poll = select.poll()

        def give(process: Process, job: Job) -> None:
            busy[process.reports] = process, job
            poll.register(process.reports, select.POLLIN)
            try:
                process.give(self.rounds, block, job)
            except BrokenPipeError:
                raise self._failure(process, "") from None

        for process in free[: len(waiting)]:
            give(process, waiting.popleft())
        while busy:
            for end, _ in poll.poll():
                process, job = busy.pop(end)
                poll.unregister(end)
                kind, text = process.report()
                if kind == CHANGED:
                    give(self._replaced(process), job)
                elif kind != DONE:
                    raise self._failure(process, text)
                elif waiting:
                    give(process, waiting.popleft())

    def _replace_ended(self) -> None:
        """Replace workers that ended between rounds, as when memory ran out."""
        for process in list(self.processes):
            try:
                ended = os.waitpid(process.pid, os.WNOHANG) != (0, 0)
            except ChildProcessError:
                ended = True
            if ended:
                self._replaced(process)

    def _replaced(self, process: Process) -> Process:
        process.end()
        place = self.processes.index(process)
        del self.processes[place]  # its pipes are closed, and the new worker must not close them again
        self.processes.insert(place, new := self._start())
        return new

    def _failure(self, process: Process, text: str) -> Exception:
        self.processes.remove(process)
        with contextlib.suppress(ChildProcessError):  # programs that ignore SIGCHLD never see how their children end
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        status = process.end()
        if text:
            return RuntimeError(f"a worker process failed:\n{text}")
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return MemoryError("a worker process was killed, most likely because memory ran out; use fewer threads or a smaller batch size")
        return RuntimeError(f"a worker process crashed ({exit_reason(status)})")

    def _start(self) -> Process:
        (job_read, job_write), (report_read, report_write) = os.pipe(), os.pipe()
        parent = os.getpid()
        child = fork()
        if child:
            os.close(job_read)
            os.close(report_write)
            return Process(child, job_write, report_read)
        status = 1
        try:
            die_with_parent(parent)
            leave_signals_to_parent()
            for end in (job_write, report_read, *(end for other in self.processes for end in (other.jobs, other.reports))):
                os.close(end)
            torch.set_num_threads(1)
            keep_memory()
            self._serve(job_read, report_write)
            status = 0
        except BaseException:
            text = traceback.format_exc().encode()
            _write(report_write, REPORT.pack(FAILED, len(text)) + text)
        finally:
            os._exit(status)  # skip cleanup: all resources belong to the parent

    def _serve(self, jobs: int, reports: int) -> None:
        """Take jobs until there are no more: the life of a worker."""
        last = 0
        while len(message := _read(jobs, JOB.size)) == JOB.size:
            round, block, a, row = JOB.unpack(message)
            if round != last:
                if last and self.restamp() != self.stamp:
                    os.write(reports, REPORT.pack(CHANGED, 0))
                    return
                last, (requests, results) = round, read_round(self.inputs, self.results[block], self.known)
            result = self.engine.train_one(requests[a], row)
            results[a].put(row, result, self.engine.work.buffers() if requests[a].buffers else {})
            os.write(reports, REPORT.pack(DONE, 0))


def _with_spare(size: int) -> int:
    """Return room for rounds twice as large, if that is not much memory."""
    return size + min(size, SPARE)


def _end(processes: list[Process], owner: int) -> None:
    """End the workers; a forked copy of the crew must not."""
    if os.getpid() == owner:
        while processes:
            processes.pop().end()


def _read(end: int, size: int) -> bytes:
    """Read this many bytes, or fewer if the other side has closed."""
    found = b""
    while len(found) < size and (more := os.read(end, size - len(found))):
        found += more
    return found


def _write(end: int, message: bytes) -> None:
    while message:
        message = message[os.write(end, message) :]
