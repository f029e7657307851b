"""Small experiments for `run`, `compare` and `sweep`, and their reference results without interruptions."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

import mimicfl as mf
from mimicfl.seeds import stream
from mimicfl.toml import dumps

from .processes import Server

VARIANTS = 4  # experiments per command and engine; few, so that reference results are reused often
ALGORITHMS = (*mf.algorithms.ALGORITHMS.factories, "fedprox:mu=0.1", "mifa:never_seen=exclude", "fedau:cutoff=3")
AVAILABILITY = ("always", "static:0.4", "time-varying:0.3", "markov:0.3,0.5", "bounded:4", "cyclic:5,2", "label-correlated:rare=0.2")
LANES = {"batched": 8, "streams": 4}
Result = dict[str, dict[str, Any]]  # per run folder: a digest per tensor, and the rows


@dataclass(frozen=True)
class Job:
    """A command without its output folder."""

    command: str
    engine: str
    settings: dict[str, Any]
    algorithms: list[str]
    seeds: int
    threads: int

    @property
    def name(self) -> str:
        text = json.dumps([self.command, self.engine, self.settings, self.algorithms, self.seeds, self.threads])
        return f"{self.command}-{self.engine.replace(':', '-')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def arguments(self, out: Path, files: Path) -> list[str]:
        """Return the command line; for a sweep, write its grid to `files` first."""
        if self.command == "sweep":
            grid = files / f"{self.name}.toml"
            grid.write_text(dumps(self.settings | {"engine": self.engine}) + self._grid(), encoding="utf-8")
            return ["sweep", str(grid), "--out", str(out)]
        options = [part for key, value in self.settings.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        which = (
            ["--algorithm", self.algorithms[0]] if self.command == "run" else ["--algorithms", *self.algorithms, "--seeds", str(self.seeds)]
        )
        return [self.command, *options, *which, "--engine", self.engine, "--out", str(out)]

    def _grid(self) -> str:
        return f"\n[grid]\nalgorithm = {json.dumps(self.algorithms)}\nseed = {self.seeds}\nlr = [0.1]\n"


def draw(command: str, engine: str, variant: int, device: str = "cpu") -> Job:
    """Draw the experiment of this number, which is the same in every soak."""
    chance = stream(variant, f"soak {command} {engine}")
    processes = engine == "workers"
    settings: dict[str, Any] = {
        "num_clients": int(chance.integers(4, 9)),
        "availability": str(chance.choice(AVAILABILITY)),
        "model": str(chance.choice(["logistic", "mlp:8", "mlp:12,6"])),
        "rounds": int(chance.integers(2, 5) if processes else chance.integers(10, 60)),
        # Rounds with worker processes are long, so that kills hit them.
        "steps": int(chance.integers(200, 500) if processes else chance.integers(1, 6)),
        "batch_size": int(chance.integers(2, 9)),
        "eval_every": int(chance.choice([1, 2, 5])),
        "checkpoint_every": int(chance.choice([0, 1, 3])),
        "state_budget": str(chance.choice(["auto", "0"])),  # 0: per-client state is always in a memory-mapped file
        "momentum": float(chance.choice([0.0, 0.9])),
        "diagnose": str(chance.choice(["off", "off", "every=3"])),
        "seed": int(chance.integers(100)),
    }
    if processes:
        settings |= {"availability": "always", "eval_every": 5}
    if processes or command != "run":  # diagnostics and their plots take longer than the training
        settings["diagnose"] = "off"
    if settings["diagnose"] != "off":
        settings |= {"momentum": 0.0, "rounds": 12}
    if device != "cpu":
        settings["device"] = device
    if command != "sweep":
        settings["lr"] = 0.05
    if command != "run":
        del settings["seed"]
    count = {"run": 1, "compare": 2, "sweep": 2}[command]
    algorithms = [str(name) for name in chance.choice(ALGORITHMS, size=count, replace=False)]
    if engine in LANES and command != "run":
        engine = f"{engine}:{LANES[engine]}"  # with fixed lanes, a run does not depend on the runs trained with it
    return Job(command, engine, settings, algorithms, 2 if command == "sweep" and not processes else 1, 2 if processes else 1)


@dataclass
class References:
    """The result and the duration of each job without interruptions, computed once."""

    server: Server
    folder: Path

    def __post_init__(self) -> None:
        self.known: dict[str, tuple[Result, float, tuple[int, int]]] = {}

    def of(self, job: Job) -> tuple[Result, float, tuple[int, int]]:
        """Return the result of an uninterrupted command, its seconds, its bytes and the bytes of its largest file."""
        if job.name not in self.known:
            out = self.folder / job.name
            process, _ = self.server.run(job.arguments(out, self.folder), threads=job.threads)
            if process.status != 0:
                raise RuntimeError(f"an uninterrupted command ends with {process.status}: {process.errors[-2000:]}")
            sizes = [file.stat().st_size for file in out.rglob("*") if file.is_file()]
            self.known[job.name] = read(out), process.took, (sum(sizes), max(sizes))
        return self.known[job.name]


def read(out: Path) -> Result:
    """Read every run below `out`: digests of all tensors of its checkpoint and result, and all rows without the seconds."""
    return {str(config.parent.relative_to(out)): _run(config.parent) for config in sorted(out.rglob("config.toml"))}


def _run(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("checkpoint", "final"):
        file = folder / f"{name}.safetensors"
        if not file.exists():
            found[name] = "missing"
            continue
        with safe_open(file, framework="np") as opened:
            found |= {f"{name} {key}": _digest(opened.get_tensor(key)) for key in opened.keys()}  # noqa: SIM118
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines() if (folder / "rows.jsonl").exists() else []
    for line in lines:
        row = json.loads(line)
        found[f"row {row['round']}"] = _without_seconds(row)
    return found


def _without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row, and the diagnostics in it, without the time they took."""
    kept = {key: value for key, value in row.items() if key not in ("seconds", "crc")}  # the checksum covers the seconds
    return {key: _without_seconds(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _digest(values: np.ndarray) -> str:
    return f"{values.dtype} {values.shape} {hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]}"


def difference(expected: Result, found: Result) -> str:
    """Describe the difference between two results in one line; empty if they are equal."""
    if expected.keys() != found.keys():
        return f"runs {sorted(found)} instead of {sorted(expected)}"
    parts = [
        f"{run}: {key}: {_entries(expected[run].get(key), found[run].get(key))}"
        for run in expected
        for key in sorted(expected[run].keys() | found[run].keys())
        if expected[run].get(key) != found[run].get(key)
    ]
    return f"{len(parts)} differences, first {parts[0]}" if parts else ""


def _entries(expected: Any, found: Any) -> str:
    if isinstance(expected, dict) and isinstance(found, dict):
        key = next(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
        return f"{key}: {_entries(expected.get(key), found.get(key))}"
    return f"{str(found)[:150]} instead of {str(expected)[:150]}"
