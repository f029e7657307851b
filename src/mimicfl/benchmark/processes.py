"""Worker processes that train batches at the same time, on one device. This process hands out the runs and alone writes records.

Workers are new processes, not forked ones, since CUDA cannot be used in a fork. They are sent lines of JSON and answer with lines of JSON;
a worker whose input ends, because this process was killed, ends as well.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import UsageError
from .measure import Result
from .queue import Batch, Queue, Say, plan_of

MOST = 64  # more worker processes only fill the memory
HURRY = 0.8  # share of the time left that a batch may be expected to take
PATIENCE = 10.0  # seconds for a worker to end after its input has ended


# Ctrl-C reaches all processes of a terminal. Workers ignore it from the start: they end with their input.
START = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from mimicfl.benchmark.worker import main; main()"


class Ended(Exception):
    """A worker process ended while it had runs to train."""


class Worker:
    def __init__(self, number: int, gpu: bool) -> None:
        self.number = number
        package = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
        threads = {"OMP_NUM_THREADS": "1"} if gpu else {}  # their few computations on the CPU are small
        self.process = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=threads | dict(os.environ) | {"PYTHONPATH": paths},
            text=True,
        )

    def train(self, job: dict[str, Any]) -> dict[str, Result]:
        """Send a batch and wait for the results, by name."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        if not line.endswith("\n"):
            raise Ended(_reason(self.process.wait()))
        answer = json.loads(line)
        if "error" in answer:
            raise UsageError(answer["error"]) if answer["expected"] else RuntimeError(answer["error"])
        return dict(answer["results"])

    def close(self, at_once: bool) -> None:
        """End the process; runs in progress can be resumed."""
        assert self.process.stdin is not None
        if at_once:
            self.process.kill()
        with contextlib.suppress(OSError):  # it may have ended already
            self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Workers:
    """Worker processes, one thread of this process for each; use it as a context manager."""

    def __init__(self, count: int, gpu: bool) -> None:
        self.count, self.gpu = count, gpu
        self.workers: list[Worker] = []
        self.errors: list[BaseException] = []

    def __enter__(self) -> "Workers":
        try:
            for number in range(self.count):
                self.workers.append(Worker(number, self.gpu))
        except OSError as error:
            self._close(at_once=True)
            raise UsageError(f"process {len(self.workers) + 1} cannot be started ({error.strerror}); give fewer --processes") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.errors += [] if error is None else [error]  # that the others end now is expected
        self._close(at_once=kind is not None)

    def _close(self, at_once: bool) -> None:
        for worker in self.workers:
            worker.close(at_once)

    def run(
        self,
        queue: Queue,
        target: float,
        out: Path,
        settings: dict[str, Any],
        until: float | None,
        say: Say | None,
        recorded: Callable[[Batch], None],
    ) -> bool:
        """Train until the queue is empty (True) or the time is up (False). `recorded` is called with every batch after it is recorded."""

        def serve(worker: Worker) -> None:
            took = 0.0  # seconds per run of the last batch
            try:
                while batch := queue.take(_fitting(until, took)):
                    left = None if until is None else until - time.monotonic()
                    if left is not None and left <= 0:
                        queue.stop()
                        return
                    queue.announce(batch, say, f" in process {worker.number + 1}")
                    began = time.monotonic()
                    runs = {name: e.to_dict() for name, e in plan_of(batch, settings).items()}
                    results: dict[str, Result] = {}
                    try:
                        results = worker.train({"runs": runs, "target": target, "out": str(out), "seconds": left})
                    finally:
                        queue.give_back(batch, results)
                    took = (time.monotonic() - began) / len(batch)
                    recorded(batch)
            except Ended as reason:
                ended.append(worker)
                if say and not self.errors:
                    say(f"process {worker.number + 1} ended unexpectedly ({reason}); the others train its runs")
            except BaseException as error:
                self.errors.append(error)
                queue.stop()
                for other in self.workers:
                    other.process.kill()

        ended: list[Worker] = []
        threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        if len(ended) == len(self.workers):
            raise UsageError("all processes ended unexpectedly; run the same command again, with fewer --processes if memory was short")
        return queue.complete


def _fitting(until: float | None, took: float) -> int | None:
    """How many runs are likely to end in time, at least one; None if that is unknown."""
    return None if until is None or not took else max(1, int(HURRY * (until - time.monotonic()) / took))


def _reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
