"""Kills: commands that are signalled, or run out of disk space, must finish bit-equal to uninterrupted ones.

A trial interrupts one command up to four times, at random or chosen moments, restarts or resumes it each time, and lets it finish. It then
compares all tensors and rows with those of an uninterrupted command, and checks for orphans, held locks, leftover files and tracebacks.
"""

import fcntl
import itertools
import os
import shlex
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mimicfl.seeds import stream

from . import jobs, moments
from .disk import make_room, small_disk, unmount_all
from .jobs import Job, References
from .outcome import Outcome
from .processes import Process, Server

# The lengths of these three lists have no common factor, so 120 consecutive trials cover every combination.
ENGINES = ("workers", "native", "plain", "batched", "auto")
COMMANDS = ("run", "compare", "sweep")
ACTIONS = ("SIGKILL", "SIGINT", "full disk", "SIGTERM", "SIGSTOP SIGKILL", "SIGINT SIGINT", "SIGHUP", "SIGSTOP SIGCONT")
ENDS = {"SIGKILL": {-9}, "SIGINT": {130}, "SIGTERM": {-15, 143}, "SIGHUP": {-1, 129}, "SIGCONT": {0}}
# Files whose changes trigger a signal, and the maximum number of changes to wait for.
AIMS = {"config.toml": 1, "env.json": 1, ".part": 8, ".tmp": 8, "rows.jsonl": 8, "checkpoint.safetensors": 8, "final.safetensors": 2}
REPORTS = {"report.html": 1, ".png": 2}
GPU = Path("/dev/nvidiactl")  # checked by file, since a process that has initialised CUDA cannot fork
WORKER = "SIGKILL of a worker"
FRESH = 0.04  # fraction of the commands that start in a new interpreter
HANGS = 900.0  # seconds after which a command counts as hung; long, since the machine may be busy
LINGERS = 20.0  # seconds after which a process that outlives its parent is an orphan
RUNS_ON = 0.1  # CPU seconds after which a worker should have noticed that its parent is dead
UGLY = ("Traceback", "Exception ignored", "Fatal Python error", "[Errno", "Bus error", "core dumped")


def trials(seed: int, enough: Callable[[], bool], folder: Path) -> Iterator[Outcome]:
    """Run trials, starting with `seed`, until `enough()`."""
    folder.mkdir(parents=True, exist_ok=True)
    unmount_all(folder)
    room = Path(tempfile.mkdtemp(prefix="kills-", dir=folder))
    server = Server(room / "server", {"MIMICFL_CACHE": str(room / "cache")})
    (room / "references").mkdir()
    references = References(server, room / "references")
    try:
        for number in itertools.count(seed):
            if enough():
                break
            yield Trial(number, room, server, references).outcome()
    finally:
        server.close()


class Trial:
    """One command and its interruptions."""

    def __init__(self, seed: int, room: Path, server: Server, references: References) -> None:
        self.seed, self.server, self.references = seed, server, references
        self.folder = room / f"trial-{seed}"
        self.chance = stream(seed, "soak kills")
        self.job = self._job()
        self.action = ACTIONS[seed % len(ACTIONS)]
        self.out = self.folder / "out"
        own_cache = self.job.engine == "native" and self.chance.random() < 0.4  # kernels are then compiled in this trial
        own_cache = own_cache and self.action != "full disk"  # no compiling on a full disk: plain would be used, with a notice
        self.cache = self.folder / "cache" if own_cache else room / "cache"
        self.counts: Counter[str] = Counter({"trials": 1})
        self.story: list[str] = []
        self.problems: list[str] = []

    def _job(self) -> Job:
        command, engine = COMMANDS[self.seed % len(COMMANDS)], ENGINES[self.seed % len(ENGINES)]
        variant = int(self.chance.integers(jobs.VARIANTS))
        if self.seed % 7 == 6 and GPU.exists():
            return jobs.draw(command, ("streams", "batched")[self.seed % 2], variant, "cuda")
        return jobs.draw(command, engine, variant)

    def outcome(self) -> Outcome:
        for name in ("files", "tmp", "processes"):
            (self.folder / name).mkdir(parents=True)
        self.server.folder = self.folder / "processes"
        try:
            self.expected, self.duration, self.sizes = self.references.of(self.job)
            self._play()
        except RuntimeError as error:
            self.problems.append(str(error))
        what = f"{self.job.command} on {self.job.engine}: {'; '.join(self.story)}"
        if self.problems:
            return Outcome("kills", "failed", self.seed, what, "; ".join(self.problems), self._reproduce(), dict(self.counts))
        shutil.rmtree(self.folder)
        return Outcome("kills", "ok", self.seed, what, counts=dict(self.counts))

    def _play(self) -> None:
        if self.action == "full disk":
            self._fill()
            return
        more = self.chance.choice([*ACTIONS, WORKER], size=int(self.chance.integers(0, 4)))
        for action in [self.action, *(str(each) for each in more if each != "full disk")]:
            if not self._strike(action):
                break
            if self.problems:
                return
        self._finish()

    def _strike(self, action: str) -> bool:
        """Start the command and interrupt it; return False if it finished first."""
        fresh = bool(self.chance.random() < FRESH)
        resume = self.chance.random() < 0.4 and any(self.out.rglob("config.toml"))
        process = self._launch(resume, fresh)
        try:
            moment = self._moment(fresh)
            self.story[-1] += f", {action} {moment}"
            if self.job.engine == "workers" and self.chance.random() < 0.5:
                self.story[-1] += ", once there are workers"
                _works(process)
            if (not fresh or _imports(process)) and moment.wait(process, [self.out, self.cache], HANGS):
                self._act(process, action)
            else:
                self.story[-1] += " (ended before)"
                self._judge(process, "")
            return process.status != 0
        finally:
            process.close()

    def _moment(self, fresh: bool) -> moments.Moment:
        if self.cache.parent == self.folder and self.chance.random() < 0.7:  # while the compiler runs
            return moments.Moment(float(self.chance.uniform(0, 1)), ".lock")
        return moments.draw(self.chance, self.duration + 2 * fresh, AIMS if self.job.command == "run" else AIMS | REPORTS)

    def _act(self, process: Process, action: str) -> None:
        """Send the signals and check how the command ends."""
        # A terminal signals the whole process group, `kill` a single process.
        group = bool(self.chance.random() < (0.7 if action.startswith(("SIGINT", "SIGHUP")) else 0.3))
        if action == WORKER:
            workers = [member for member in process.others() if member.name.startswith("python")]
            if self.job.engine != "workers" or not workers:
                action = "SIGKILL"
            else:
                os.kill(workers[0].pid, signal.SIGKILL)
        for number, name in enumerate(action.split() if action != WORKER else []):
            if number:
                process.wait(float(self.chance.uniform(0, 0.1)))
            process.send(getattr(signal, name), group)
        self.story[-1] += f" to the {'group' if group else 'process'}"
        self._judge(process, action)

    def _judge(self, process: Process, action: str) -> None:
        """Check the exit status and the error output."""
        status = process.wait(HANGS)
        if status is None:
            self.problems.append(f"hangs: no end {HANGS:.0f} s after {action or 'the start'}")
            return
        self._orphans(process)
        expected = {2} if action in (WORKER, "full disk") else ENDS.get(action.split()[-1], set()) if action else set()
        errors = process.errors
        if status not in expected | {0} and not (status == -signal.SIGINT and not errors):
            self.problems.append(f"ends with {status} instead of {sorted(expected | {0})}, stderr {errors[-1500:]!r}")
        elif status > 0 and "mimicfl: " not in errors:
            self.problems.append(f"ends with {status} and no message, stderr {errors[-1500:]!r}")
        if found := [word for word in UGLY if word in errors]:
            self.problems.append(f"stderr has {found[0]!r}: {errors[-1500:]!r}")
        self._count(action, status)

    def _count(self, action: str, status: int) -> None:
        hit = bool(action) and (status != 0 or action.endswith("SIGCONT"))
        if hit:
            self.counts.update({action: 1, self.job.engine.partition(":")[0]: 1, self.job.command: 1, "kills": int(status != 0)})

    def _orphans(self, process: Process) -> None:
        """Check that no process of the session is left: workers end with their parent, a compiler when it is done."""
        first = {member.pid: member.cpu for member in process.others()}
        until = time.monotonic() + LINGERS
        while left := process.others():
            ran_on = [m for m in left if m.name.startswith("python") and m.cpu - first.get(m.pid, m.cpu) > RUNS_ON]
            if ran_on or time.monotonic() > until:
                names = ", ".join(f"{m.name} {m.pid} (used {m.cpu - first.get(m.pid, 0.0):.2f} s of CPU since)" for m in ran_on or left)
                self.problems.append(f"orphans after the end of {process.pid}: {names}")
                return
            time.sleep(0.01)

    def _fill(self) -> None:
        """Let the disk become full during the run, then free space again."""
        disk = self.folder / "disk"
        whole, largest = self.sizes
        share = float(np.exp(self.chance.uniform(np.log(0.02), 0)))
        with small_disk(disk, max(16384, int(share * whole))) as mounted:
            self.out = disk / "out"
            limited = not mounted or self.chance.random() < 0.4
            if limited and mounted:
                make_room(disk)
            process = self._launch(limits={"RLIMIT_FSIZE": max(4096, int(share * largest))} if limited else {})
            self.story[-1] += (
                f", files of at most {share:.2f} of what is needed" if limited else f", {share:.2f} of the space that is needed"
            )
            try:
                self._judge(process, "full disk")
            finally:
                process.close()
            if mounted and not limited:
                make_room(disk)
            if not self.problems:
                self._finish()

    def _launch(self, resume: bool = False, fresh: bool = False, limits: dict[str, int] | None = None) -> Process:
        """Start the command, or `mimicfl resume` on its folder."""
        arguments = ["resume", str(self.out)] if resume else self.job.arguments(self.out, self.folder / "files")
        self.story.append(arguments[0] + " in a new interpreter" * fresh)
        environment = {"MIMICFL_CACHE": str(self.cache), "TMPDIR": str(self.folder / "tmp")}
        return self.server.start(arguments, threads=self.job.threads, fresh=fresh, environment=environment, limits=limits)

    def _finish(self) -> None:
        """Let the command finish without interruptions, perhaps after `resume`."""
        resume = self.chance.random() < 0.5 and any(self.out.rglob("config.toml"))
        for resumed in [True, False] if resume else [False]:
            process = self._launch(resumed)
            try:
                self._judge(process, "")
            finally:
                process.close()
            if self.problems:
                return
        self._check()

    def _check(self) -> None:
        if difference := jobs.difference(self.expected, jobs.read(self.out)):
            self.problems.append(f"not bit-equal: {difference}")
        if left := leftovers(self.out, self.cache, self.folder / "tmp"):
            self.problems.append(f"leftovers: {', '.join(left)}")
        for lock in self.out.rglob(".lock"):
            with lock.open("a") as handle:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.problems.append(f"{lock} is still held")

    def _reproduce(self) -> str:
        command = shlex.join(["mimicfl", *self.job.arguments(self.out, self.folder / "files")])
        variables = f"OMP_NUM_THREADS={self.job.threads} MIMICFL_CACHE={self.cache} TMPDIR={self.folder / 'tmp'}"
        return f"python -m soak kills --seed {self.seed} --trials 1   or: {variables} {command}, then {'; '.join(self.story)}"


def leftovers(*folders: Path) -> list[str]:
    """Return leftover files: incomplete and temporary ones, except those of a killed compiler."""
    names = {entry.path: entry.name for folder in folders for entry in moments.walk(folder)}
    return sorted(path for path, name in names.items() if name.endswith(".part") or name.startswith((".rows-", "tmp", ".tmp")))


def _works(process: Process) -> None:
    """Wait until there are worker processes."""
    while process.wait(0.001) is None and not process.others():
        pass


def _imports(process: Process) -> bool:
    """Wait until a new interpreter begins to import PyTorch, because Ctrl-C during Python's startup is not tested."""
    while process.wait(0.005) is None:
        try:
            if "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace"):
                return True
        except OSError:
            break
    return False
