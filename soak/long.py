"""Long runs: 20,000 rounds, 100,000 clients, a sweep of 600 runs. Memory, open files and time per round must not grow.

The trials with seeds 0, 1 and 2 have a hundredth of that size; they check everything except the time.
"""

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mimicfl.seeds import stream

from .jobs import ALGORITHMS
from .outcome import Outcome, Verdict
from .processes import TICK, Process, Server

SMALL = 3  # the first trials are small
ROUNDS, CLIENTS, RUNS = 20_000, 100_000, 600
TOO_MUCH = 2.0  # largest accepted ratio of late to early rounds, and of cost per client in a large and a small population
ROW = 8192  # bytes of memory that a round may keep, for its row
CLIENT = 20_000  # bytes of memory per client of a population
SLACK = 64 * 2**20  # bytes of memory that are tolerated
ENOUGH = 1.0  # CPU seconds below which times are not compared
DESCRIPTORS = 1024  # limit of open files on most systems
LONGEST = 3600.0


def trials(seed: int, enough: Callable[[], bool], folder: Path) -> Iterator[Outcome]:
    """Run trials, starting with `seed`, until `enough()`."""
    folder.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix="long-", dir=folder))
    server = Server(room / "processes", {"MIMICFL_CACHE": str(room / "cache")})
    try:
        for number in itertools.count(seed):
            if enough():
                break
            kind = (Rounds, Clients, Runs)[number % 3]
            yield kind(number, room / f"trial-{number}", server).outcome()
    finally:
        server.close()


class Trial:
    """One long run and the problems found in it."""

    counted = ""

    def __init__(self, seed: int, folder: Path, server: Server) -> None:
        self.seed, self.folder, self.server = seed, folder, server
        self.chance = stream(seed, "soak long")
        self.scale = 0.01 if seed < SMALL else 1.0
        self.problems: list[str] = []
        self.what = ""

    def outcome(self) -> Outcome:
        self.folder.mkdir(parents=True)
        try:
            count = self.play()
        except RuntimeError as error:
            self.problems.append(str(error))
            count = 0
        again = f"python -m soak long --seed {self.seed} --trials 1"
        verdict: Verdict = "failed" if self.problems else "ok"
        if not self.problems:
            shutil.rmtree(self.folder)
        return Outcome(
            "long runs", verdict, self.seed, self.what, "; ".join(self.problems), again if self.problems else "", {self.counted: count}
        )

    def play(self) -> int:
        raise NotImplementedError

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        process, found = self.server.run(arguments, LONGEST, call=f"soak.growth:{name}", limits={"RLIMIT_NOFILE": DESCRIPTORS})
        if process.status != 0:
            raise RuntimeError(f"{name}({arguments}) ends with {process.status}: {process.errors[-1500:]}")
        return found

    def expect(self, good: bool, sentence: str) -> None:
        if not good:
            self.problems.append(sentence)


class Rounds(Trial):
    """A run of a tiny problem with very many rounds."""

    counted = "rounds"

    def play(self) -> int:
        rounds = int(ROUNDS * self.scale)
        settings = {
            "dataset": "synthetic:quadratic,dim=5,samples=4",
            "num_clients": 5,
            "algorithm": ALGORITHMS[self.seed // 3 % len(ALGORITHMS)],
            "availability": str(self.chance.choice(["static:0.4", "markov:0.3,0.5", "bounded:6", "time-varying:0.2"])),
            "engine": ("plain", "native", "batched")[self.seed // 3 % 3],
            "rounds": rounds,
            "steps": 1,
            "batch_size": 4,
            "lr": 0.001,
            "eval_every": int(self.chance.choice([1, 50])),
            "checkpoint_every": int(self.chance.choice([0, 100])),
        }
        self.what = f"{rounds:,} rounds: {settings}"
        found = self.call("many_rounds", {"settings": settings, "out": str(self.folder / "run")})
        self._judge(found, rounds)
        return rounds

    def _judge(self, found: dict[str, Any], rounds: int) -> None:
        marks = found["marks"]
        step = len(marks) // 10
        first, last = marks[step]["cpu"] - marks[0]["cpu"], marks[-1]["cpu"] - marks[-1 - step]["cpu"]
        self.what += f"; {marks[-1]['cpu'] - marks[0]['cpu']:.1f} s of CPU, {marks[-1]['memory'] - marks[step]['memory']:,} bytes"
        early, late = found["sizes"]
        grown = marks[-1]["memory"] - marks[step]["memory"]
        self.expect(grown < SLACK + ROW * rounds, f"memory grows by {grown:,} bytes over {rounds:,} rounds")
        self.expect(marks[-1]["files"] <= marks[0]["files"], f"open files grow from {marks[0]['files']} to {marks[-1]['files']}")
        self.expect(late < 1.5 * early, f"rows grow from {early:.0f} to {late:.0f} bytes")
        if first > ENOUGH:
            self.expect(last < TOO_MUCH * first, f"the last tenth takes {last:.2f} s of CPU, the first {first:.2f} s")
            self.expect(found["resume"] < 5 * first, f"resuming takes {found['resume']:.2f} s of CPU, a tenth of the run {first:.2f} s")
            self.expect(
                found["again"] < 5 * first, f"reading the end takes {found['again']:.2f} s of CPU, a tenth of the run {first:.2f} s"
            )


class Clients(Trial):
    """A few rounds with few active clients of a very large population, and of a tenth of it."""

    counted = "clients"

    def play(self) -> int:
        clients, rounds = int(CLIENTS * self.scale), 20
        turn = self.seed // 3  # cycle through the settings, since there are few trials of this size
        common = {
            "rounds": rounds,
            "partition": ("iid", "shards", "classes")[turn % 3],
            "algorithm": ("mimic", "scaffold", "mifa", "fedvarp", "fedau")[turn % 5],
            "seed": int(self.chance.integers(1000)),
        }
        patterns = ["static:{}", "time-varying:{}", "markov:{},0.9"]
        pattern = str(self.chance.choice(patterns))
        self.what = f"{clients:,} clients: {common} {pattern}"
        few, many = (self._measure(n, pattern, common) for n in (clients // 10, clients))
        self.what += f"; seconds of CPU { ({key: round(value, 2) for key, value in many['stages'].items()}) }, {many['memory']:,} bytes"
        self.expect(many["memory"] < SLACK + CLIENT * clients, f"{clients:,} clients take {many['memory']:,} bytes")
        for stage, seconds in many["stages"].items():
            allowed = 10 * TOO_MUCH * few["stages"][stage]
            if seconds > ENOUGH:
                self.expect(seconds < allowed, f"{stage}: {seconds:.2f} s of CPU, with a tenth of the clients {few['stages'][stage]:.2f} s")
        return clients

    def _measure(self, clients: int, pattern: str, common: dict[str, Any]) -> Any:
        """Measure a run with about ten active clients per round, independent of the population."""
        availability = pattern.format(f"{10 / clients:.9f}")
        out = str(self.folder / str(clients))
        return self.call("many_clients", {**common, "num_clients": clients, "availability": availability, "out": out})


class Runs(Trial):
    """A sweep of very many runs and one of a tenth of them; the large one is called again when it is finished."""

    counted = "runs"

    def play(self) -> int:
        runs = max(10, int(RUNS * self.scale) // 2 * 2)
        names = [str(name) for name in self.chance.choice(ALGORITHMS, size=2, replace=False)]
        self.what = f"a sweep of {runs} runs: {names}"
        few, many, again = (self._sweep(count // 2, names) for count in (max(2, runs // 10), runs, runs))
        self.what += f"; {many['cpu']:.1f} s of CPU, again {again['cpu']:.1f} s, {many['memory']:,} bytes, {many['files']} open files"
        if many["cpu"] > ENOUGH:
            allowed = TOO_MUCH * runs / max(2, runs // 10) * few["cpu"]
            self.expect(many["cpu"] < allowed, f"{runs} runs take {many['cpu']:.1f} s of CPU, a tenth of them {few['cpu']:.1f} s")
            self.expect(
                again["cpu"] < many["cpu"], f"{runs} finished runs take {again['cpu']:.1f} s of CPU, the first time {many['cpu']:.1f} s"
            )
        self.expect(many["memory"] < few["memory"] + SLACK + 500_000 * runs, f"{runs} runs take {many['memory']:,} bytes")
        return runs

    def _sweep(self, seeds: int, names: list[str]) -> dict[str, float]:
        grid = self.folder / f"{seeds}.toml"
        common = 'num_clients = 4\nrounds = 3\nsteps = 1\nmodel = "logistic"\neval_every = 3\navailability = "static:0.5"\n'
        grid.write_text(f"{common}\n[grid]\nalgorithm = {names}\nseed = {seeds}\n".replace("'", '"'), encoding="utf-8")
        arguments = ["sweep", str(grid), "--out", str(self.folder / str(seeds))]
        process = self.server.start(arguments, limits={"RLIMIT_NOFILE": DESCRIPTORS})
        try:
            found = _watched(process)
        finally:
            process.close()
        if process.status != 0:
            raise RuntimeError(f"a sweep of {2 * seeds} runs ends with {process.status}: {process.errors[-1500:]}")
        return found


def _watched(process: Process) -> dict[str, float]:
    """Return the peak memory, the peak number of open files and the CPU time of a process."""
    most = {"memory": 0.0, "files": 0.0}
    place = Path(f"/proc/{process.pid}")
    while process.wait(0.1) is None:
        try:
            status = dict(line.split(":", 1) for line in (place / "status").read_text(encoding="utf-8").splitlines())
            most["memory"] = max(most["memory"], int(status.get("VmHWM", "0 kB").split()[0]) * 1024)
            most["files"] = max(most["files"], len(list((place / "fd").iterdir())))
        except OSError:  # the process is ending
            continue
    fields = (place / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()  # the process stays a zombie until it is closed
    return {**most, "cpu": (int(fields[11]) + int(fields[12])) / TICK}
