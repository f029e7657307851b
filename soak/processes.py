"""Starts commands as processes in their own sessions, signals them, and finds the remaining processes of a session."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mimicfl

PATH = [str(Path(package).resolve().parent.parent) for package in (__file__, str(mimicfl.__file__))]
TICK = os.sysconf("SC_CLK_TCK")
ANSWER = 600.0  # seconds; the first answer waits for the imports, which take minutes on a busy machine


@dataclass(frozen=True)
class Member:
    """A living process of a session."""

    pid: int
    name: str
    cpu: float  # seconds used so far


class Process:
    """A command that is running, or has ended and still holds its pid."""

    def __init__(self, server: "Server", pid: int, stdout: Path, stderr: Path) -> None:
        self.server, self.pid = server, pid
        self.status: int | None = None
        self.files = stdout, stderr
        self.began = time.monotonic()
        self.took = 0.0

    def wait(self, seconds: float) -> int | None:
        """Return the status (a signal as a negative number), or None if it is still running after this time."""
        if self.status is None and (answer := self.server.answer(seconds)) is not None:
            self.status = int(answer["status"])
            self.took = time.monotonic() - self.began
        return self.status

    def send(self, number: int, group: bool) -> None:
        """Send a signal to the command, or to its process group, as a terminal does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number) if group else os.kill(self.pid, number)

    def others(self) -> list[Member]:
        """Return the other living processes of its session."""
        return [member for member in session(self.pid) if member.pid != self.pid]

    @property
    def output(self) -> str:
        return self._text(0)

    @property
    def errors(self) -> str:
        return self._text(1)

    def _text(self, k: int) -> str:
        if not self.files[k].exists():  # killed before it opened the file
            return ""
        return self.files[k].read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the remaining processes of the session and release its pid."""
        while self.wait(0.05) is None or self.others():
            self.send(signal.SIGKILL, group=True)
            for member in self.others():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
        self.server.tell("")


def session(leader: int) -> list[Member]:
    """Return the living processes of a session."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process has ended in the meantime
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        if int(fields[3]) == leader and fields[0] not in "ZX":
            found.append(Member(int(entry.name), name, (int(fields[11]) + int(fields[12])) / TICK))
    return found


@dataclass
class Server:
    """The fork server, started on first use."""

    folder: Path
    environment: dict[str, str]
    process: "subprocess.Popen[str] | None" = field(default=None, init=False)
    started: int = field(default=0, init=False)

    def start(
        self,
        arguments: Any,
        *,
        call: str = "",
        threads: int = 1,
        fresh: bool = False,
        environment: dict[str, str] | None = None,
        limits: dict[str, int] | None = None,
    ) -> Process:
        """Start `mimicfl ARGUMENTS`, or a function of the soak by name, without waiting for it."""
        self._ready()
        self.started += 1
        stdout, stderr, result = (self.folder / f"process-{self.started}.{kind}" for kind in ("out", "err", "json"))
        order = {"arguments": arguments, "threads": threads, "fresh": fresh, "call": call, "result": str(result)}
        order |= {"stdout": str(stdout), "stderr": str(stderr), "environment": environment or {}, "limits": limits or {}}
        self.tell(json.dumps(order))
        answer = self.answer(ANSWER)
        if answer is None:
            raise RuntimeError("the fork server does not respond")
        return Process(self, int(answer["pid"]), stdout, stderr)

    def run(self, arguments: Any, seconds: float = 600, **options: Any) -> tuple[Process, Any]:
        """Start, wait for the end, and return the process and the function's result, if any."""
        process = self.start(arguments, **options)
        process.wait(seconds)
        process.close()
        result = process.files[0].with_suffix(".json")
        return process, json.loads(result.read_text(encoding="utf-8")) if result.exists() else None

    def tell(self, line: str) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any] | None:
        assert self.process is not None
        assert self.process.stdout is not None
        # The server sends the next line only after this one was read, so the buffer is empty.
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return None
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def _ready(self) -> None:
        if self.process is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, [*PATH, os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "soak.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal must reach only the soak, which then ends this process
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **self.environment},
        )

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None
