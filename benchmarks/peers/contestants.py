"""The frameworks that the suite compares on two CPU cores. Each gets its own environment under .peers/, created on the first run."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PEERS = ROOT / ".peers"
CONSTRAINTS = ROOT / "constraints.txt"
LIMIT_S = 900
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


def versions(name: str) -> str:
    """The versions that matter in a framework's environment."""
    shown = subprocess.run([str(python(name)), "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True).stdout
    return ", ".join(line for line in shown.splitlines() if line.split("==")[0] in ("pfl", "flwr", "torch", "ray"))


def contestants(processor_time: bool = False) -> dict[str, list[str]]:
    """The commands by name; `{}` stands for the workload and the number of rounds. Processor time is that of one process each."""
    if processor_time:
        ours = {f"mimicfl {engine}": [sys.executable, str(HERE / "ours.py"), "{}", engine] for engine in ("native", "workers", "plain")}
        pfl, bare = [str(python("pfl")), str(HERE / "with_pfl.py"), "{}"], [sys.executable, str(HERE / "bare.py"), "{}"]
        return {**ours, "pfl-research, 1 process": pfl, "bare loop, 1 thread": bare}
    torchrun = [str(python("pfl")), "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29571"]
    ours = {f"mimicfl {engine}": [sys.executable, str(HERE / "ours.py"), "{}", engine] for engine in ("native", "workers", "plain")}
    return {
        **ours,
        "pfl-research, 2 processes": [*torchrun, str(HERE / "with_pfl.py"), "{}"],
        "Flower, 2 Ray actors": [str(python("flower")), str(HERE / "with_flower.py"), "{}"],
        "bare loop, 2 threads": [sys.executable, str(HERE / "bare.py"), "{}"],
    }


def measure(command: list[str], workload: str, rounds: int, processor_time: bool = False) -> list[float]:
    """The us per client-step of each round after the first; raises `RuntimeError` with the reason if there are none."""
    filled = [word for part in command for word in ([workload, str(rounds)] if part == "{}" else [part])]
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore", "FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    quiet["OMP_NUM_THREADS"] = "1" if processor_time or "torch.distributed.run" in filled else "2"
    if processor_time:
        quiet["SUITE_PROCESSOR_TIME"] = "1"
    try:
        done = subprocess.run(filled, capture_output=True, text=True, cwd=HERE, env=quiet, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took longer than {LIMIT_S} s") from None
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("RESULT "):
            return list(json.loads(line.removeprefix("RESULT ")))
    raise RuntimeError((done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ["no result"])[-1][:200])
