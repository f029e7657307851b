"""Runs the parts in parallel, monitors their processes and collects their outcomes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .outcome import Outcome
from .parts import Entry

ROOT = Path(__file__).resolve().parents[1]
APART = 1_000_000  # distance between the first seeds of two processes of one part


@dataclass
class Process:
    """One process of a part, and its outcomes so far."""

    part: str
    entry: Entry
    seed: int
    child: subprocess.Popen
    file: Path
    log: Path
    outcomes: list[Outcome] = field(default_factory=list)
    heard: float = field(default_factory=time.monotonic)
    read: int = 0
    ended: bool = False
    broken: bool = False

    def listen(self) -> None:
        """Read new complete lines."""
        with suppress(FileNotFoundError), self.file.open("rb") as file:
            file.seek(self.read)
            whole = file.read().rpartition(b"\n")[0]
            self.read += len(whole) + bool(whole)
            found = [Outcome(**json.loads(line)) for line in whole.splitlines()]
            self.outcomes += found
            self.heard = time.monotonic() if found else self.heard

    def watch(self) -> None:
        """Detect the end of the process. A crash, a long silence and an end without any trial are failures."""
        code = self.child.poll()
        silent = (time.monotonic() - self.heard) / 60
        self.listen()
        if code is None and silent > self.entry.patience:
            self._fail(f"no outcome for {silent:.0f} minutes")
        elif code:
            self._fail(f"its process ended with {code}")
        elif code == 0 and not self.outcomes:
            self._fail("it ran no trial")
        self.ended = self.ended or code is not None

    def _fail(self, reason: str) -> None:
        self.stop()
        self.broken = True
        seed = self.outcomes[-1].seed + 1 if self.outcomes else self.seed
        again = f'python -m soak "{self.part}" --seed {seed} --trials 1'
        detail = f"{reason}\n{_tail(self.log)}".strip()
        self.outcomes.append(Outcome(self.part, "failed", seed, "the process of this part", detail, again))

    def stop(self) -> None:
        self.ended = True
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()


def run(
    parts: Mapping[str, Entry], seed: int, minutes: float, trials: int, out: Path, show: Callable[[list[Process]], None], every: float = 1.0
) -> list[Outcome]:
    """Run these parts and return all outcomes; `show` is called regularly. Ctrl-C ends the trials but not the report."""
    out.mkdir(parents=True, exist_ok=True)
    beside = max(1, (os.cpu_count() or 1) // len(parts))
    processes = [
        _start(name, entry, seed + k * APART, minutes, trials, out, k)
        for name, entry in parts.items()
        for k in range(beside if entry.spread and not trials else 1)
    ]
    limit = time.monotonic() + 60 * minutes
    try:
        while not all(process.ended for process in processes):
            time.sleep(every)
            for process in [process for process in processes if not process.ended]:
                process.watch()
                left = (limit - time.monotonic()) / 60
                if process.broken and process.outcomes[1:] and left > 0:  # use the remaining time for the next seeds
                    number = sum(other.part == process.part for other in processes)
                    processes.append(_start(process.part, process.entry, process.outcomes[-1].seed + 1, left, trials, out, number))
            show(processes)
    except KeyboardInterrupt:
        print("\nstopped; results so far", file=sys.stderr)
    finally:
        for process in processes:
            if not process.ended:
                process.stop()
                process.listen()
            shutil.rmtree(out / process.file.stem, ignore_errors=True)
    return [outcome for process in processes for outcome in process.outcomes]


def _start(part: str, entry: Entry, seed: int, minutes: float, trials: int, out: Path, number: int) -> Process:
    name = f"{part.replace(' ', '-')}-{number}"
    file, log = out / f"{name}.jsonl", out / f"{name}.log"
    file.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    numbers = [str(seed), str(60 * minutes), str(trials)]
    command = [sys.executable, "-m", "soak.worker", entry.module, *numbers, str(out / name), str(file)]
    with log.open("wb") as sink:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # so that it can be ended with all its children
        )
    return Process(part, entry, seed, child, file, log)


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-lines:])
