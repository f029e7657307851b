"""What the server costs per round, beside Flower's FedAvg: CPU seconds and memory, in memory, without a network.

    python benchmarks/flower_cost.py [--clients 100] [--size 1000000] [--rounds 4] [--repeats 1] [--together]        # about two minutes

Every strategy runs in a process of its own on the same in-memory grid with the same clients, which hardly compute. With `--together` they
alternate in one process and meet the same load on a busy machine; memory is then not measured. CPU seconds do not
depend on other load: those of the server's thread, and of the whole process with its clients and messages; the best of the rounds after
the first two is taken, over all repeats, in which the strategies alternate. Memory is the peak of the process beyond what it had before
training. FedAvg must give Flower's model.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
KINDS = {"flower": "Flower's FedAvg", "FedAvg": "FedAvg", "MimiC": "MimiC"}


def measure(kind: str, clients: int, size: int, rounds: int) -> dict[str, float]:
    """Train with one strategy in this process; returns CPU seconds per round and megabytes."""
    import resource

    import numpy as np
    import torch
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg

    import mimicfl.flower as mff

    torch.set_num_threads(1)

    def client(node: int, message: Message, context: object) -> Message:
        if message.metadata.message_type == "query":
            return mff.hello(message, context)
        w = message.content["arrays"]["w"].numpy()
        w *= np.float32(0.99)
        w += np.float32(0.001 * context.node_config["partition-id"])
        reply = {"arrays": ArrayRecord({"w": Array(w)}), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(reply), reply_to=message)

    stamps = [(time.thread_time(), time.process_time())]

    def stamp(server_round: int, arrays: ArrayRecord) -> None:
        stamps.append((time.thread_time(), time.process_time()))

    strategy = FedAvg(fraction_evaluate=0.0) if kind == "flower" else getattr(mff, kind)(fraction_evaluate=0.0, wait_for=clients)
    initial = ArrayRecord({"w": Array(np.linspace(0, 1, size, dtype=np.float32))})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with mff.Federation(client, clients).running() as grid:
        result = strategy.start(grid, initial, rounds, 3600.0, evaluate_fn=stamp)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(stamps[2:])]
    seconds, total = (min(step[k] for step in steps) for k in (0, 1))
    return {"seconds": seconds, "total": total, "megabytes": used / 1024, "sum": float(result.arrays["w"].numpy().astype(np.float64).sum())}


def measured_alone(kind: str, *sizes: int) -> dict[str, float]:
    """`measure` in a process of its own."""
    options = [f"--{name}={value}" for name, value in zip(("clients", "size", "rounds"), sizes, strict=True)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    command = [sys.executable, __file__, "--only", kind, *options]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return json.loads(out.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--together", action="store_true", help="all strategies in one process, in turn")
    parser.add_argument("--only", help="measure one strategy in this process")
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(given.only, given.clients, given.size, given.rounds)))
        return
    found: dict[str, dict[str, float]] = {}
    sizes = (given.clients, given.size, given.rounds)
    for kind in list(KINDS) * given.repeats:
        mine = measure(kind, *sizes) if given.together else measured_alone(kind, *sizes)
        found[kind] = {key: min(value, mine[key]) for key, value in found.get(kind, mine).items()}
    base = found["flower"]
    assert abs(found["FedAvg"]["sum"] - base["sum"]) < 1e-6 * given.size, "FedAvg differs from Flower's"
    print(f"{given.clients} clients, d = {given.size:,}: server, per round")
    for kind, title in KINDS.items():
        mine = found[kind]
        shown = {"process": ("total", "s", 2), "server thread": ("seconds", "s", 2), "memory": ("megabytes", "MB", 0)}
        if given.together:
            del shown["memory"]
        parts = [f"{name} {mine[key]:5.{digits}f} {unit} ({mine[key] / base[key]:.2f}x)" for name, (key, unit, digits) in shown.items()]
        print(f"{title:16}", ", ".join(parts))


if __name__ == "__main__":
    main()
