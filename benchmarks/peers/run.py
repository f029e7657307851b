"""Compares mimicfl with other frameworks, interleaved in one run: microseconds of wall time per client-step on two cores.

    python benchmarks/peers/run.py [--repeats 2]       # about a quarter of an hour

Each framework gets its own environment under .peers/, which is created on the first run. Start-up, imports, compiling and a warm-up
round are excluded for all of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from mimicfl.metrics.environment import environment

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PEERS = ROOT / ".peers"
CONSTRAINTS = ROOT / "constraints.txt"
PACKAGES = {"pfl": ["pfl[pytorch]==0.6.0"], "flower": ["flwr[simulation]>=1.41,<1.43", "torch"]}


def python(name: str) -> Path:
    """Return the interpreter of a framework's environment; create the environment if it is missing."""
    folder = PEERS / name
    ready = folder / "ready"
    if not ready.exists():
        print(f"creating the environment of {name} ...", flush=True)
        torch_only = PEERS / "constraints.txt"
        PEERS.mkdir(exist_ok=True)
        torch_only.write_text("".join(line for line in CONSTRAINTS.open() if line.startswith("torch==")))
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin/pip"), "install", "-q", "-c", str(torch_only), *PACKAGES[name]], check=True)
        ready.touch()
    return folder / "bin/python"


def contestants() -> dict[str, list[str]]:
    torchrun = [str(python("pfl")), "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29571"]
    return {
        "mimicfl native": [sys.executable, str(HERE / "ours.py"), "{}", "native"],
        "mimicfl workers": [sys.executable, str(HERE / "ours.py"), "{}", "workers"],
        "mimicfl plain": [sys.executable, str(HERE / "ours.py"), "{}", "plain"],
        "pfl-research, 2 processes": [*torchrun, str(HERE / "with_pfl.py"), "{}"],
        "Flower, 2 Ray actors": [str(python("flower")), str(HERE / "with_flower.py"), "{}"],
        "bare loop, 2 threads": [sys.executable, str(HERE / "bare.py"), "{}"],
    }


def measure(command: list[str], cohort: int, rounds: int) -> list[float]:
    filled = [word for part in command for word in ([str(cohort), str(rounds)] if part == "{}" else [part])]
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore", "FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    if "torch.distributed.run" in filled:
        quiet["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(filled, capture_output=True, text=True, cwd=HERE, env=quiet, timeout=900)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("RESULT "):
            return list(json.loads(line.removeprefix("RESULT ")))
    raise SystemExit(f"{' '.join(filled)} gave no result:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=2, help="repeats with 3 clients; 30 clients, which take ten times as long, run once")
    parser.add_argument("--cohorts", type=int, nargs="+", default=[3, 30])
    parser.add_argument("--only", nargs="+", default=[], help="run only names that begin with these, e.g. 'mimicfl native' pfl")
    options = parser.parse_args()
    chosen = {name: c for name, c in contestants().items() if not options.only or name.startswith(tuple(options.only))}
    print({key: value for key, value in environment().items() if key != "started"})
    for name in PACKAGES:
        shown = subprocess.run([str(python(name)), "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True).stdout
        print(", ".join(line for line in shown.splitlines() if line.split("==")[0] in ("pfl", "flwr", "torch", "ray")))
    for cohort in options.cohorts:
        rounds, repeats = (5, options.repeats) if cohort == 3 else (3, 1)
        found: dict[str, list[float]] = {name: [] for name in chosen}
        for _ in range(repeats):
            for name, command in chosen.items():
                found[name] += measure(command, cohort, rounds)
        best = statistics.median(next(iter(found.values())))
        print(f"\ncohort {cohort}: us per client-step, median of {repeats * (rounds - 1)} rounds (lowest-highest)")
        for name, values in found.items():
            middle = statistics.median(values)
            print(f"  {name:26} {middle:7.0f}  ({min(values):.0f}-{max(values):.0f})  {middle / best:5.1f}x", flush=True)


if __name__ == "__main__":
    main()
