"""Runs a trial in a forked child and returns its output, its exit code, its error, and whether it left processes behind."""

import json
import multiprocessing.util
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMORY = 8 << 30  # bytes of address space, so that a larger request raises an error instead of exhausting the machine
BUSY = 60  # seconds of processor time after which a trial counts as hung; the slowest valid one takes about five
HANG = 900.0  # seconds of wall-clock time, for a trial that waits; long, since the machine may be busy
GRACE = 3.0  # seconds for helper processes to notice that their parent has ended


@dataclass(frozen=True)
class Ended:
    """How a child ended. `code` is None if it hung, and negative if a signal ended it."""

    code: int | None
    out: str
    err: str
    answer: Any
    orphans: bool

    @property
    def trouble(self) -> str:
        """Describe behaviour that no trial may show; empty if there is none."""
        if self.code is None or self.code == -signal.SIGXCPU:
            return "hang: no end after " + (f"{HANG:.0f} s" if self.code is None else f"{BUSY} s of work")
        if self.code < 0:
            return f"crash: {signal.Signals(-self.code).name}"
        if "Traceback (most recent call last)" in self.err:
            return f"traceback: {site(self.err)}"
        return "orphans: processes were left behind" if self.orphans else ""


def forked(work: Callable[[], Any], folder: Path, timeout: float = HANG) -> Ended:
    """Run `work` in a child whose working folder is `folder`; an integer that it returns is its exit code."""
    sys.stdout.flush(), sys.stderr.flush()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as answer:
        pid = os.fork()
        if pid == 0:
            _child(work, folder, out.fileno(), err.fileno(), answer.fileno())
        code = _wait(pid, timeout)
        orphans = _orphans(pid, 0.0 if code is None else GRACE)
        texts = [(stream.seek(0), stream.read().decode("utf-8", "replace"))[1] for stream in (out, err, answer)]
    return Ended(code, texts[0], texts[1], json.loads(texts[2]) if texts[2] else None, orphans and code is not None)


def _child(work: Callable[[], Any], folder: Path, out: int, err: int, answer: int) -> None:
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(out, 1), os.dup2(err, 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (BUSY, BUSY + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.simplefilter("error")  # users must not see warnings of NumPy or PyTorch
        for ours in (
            r"(shards|classes|anchored) uses",
            r"the source of .* cannot be read",
            r"the model has BatchNorm",
            r"\w+ treats the clients' mean steps",
        ):
            warnings.filterwarnings("ignore", ours)
        found = work()
        code = found if isinstance(found, int) else 0
        os.write(answer, json.dumps(None if isinstance(found, int) else found).encode())
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush(), sys.stderr.flush()
            multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # what an ordinary end would do
        finally:
            os._exit(code)


def _wait(pid: int, timeout: float) -> int | None:
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], timeout)[0]:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(handle)


def _orphans(group: int, grace: float) -> bool:
    """Return whether processes of this child's session are left, and end them."""
    limit = time.monotonic() + grace
    while _alive(group):
        if time.monotonic() >= limit:
            os.killpg(group, signal.SIGKILL)
            return True
        time.sleep(0.02)
    return False


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def site(text: str) -> str:
    """Return the error and the package's last line of a traceback, to recognise failures with the same cause."""
    error = next(
        (line for line in reversed(text.strip().splitlines()) if re.match(r"[\w.]+(Error|Exception|Warning|Exit|Interrupt)?\b", line)), "?"
    )
    frames = re.findall(r'File "[^"]*/(mimicfl/[^"]+)", line (\d+)', text)
    return f"{error.partition(':')[0]} at {':'.join(frames[-1]) if frames else 'unknown place'}"
