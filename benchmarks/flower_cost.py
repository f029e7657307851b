"""What the server costs per round, compared with Flower's FedAvg: CPU seconds and memory, in memory, without a network.

    python benchmarks/flower_cost.py [--clients 100] [--size 1000000] [--rounds 8] [--repeats 5]        # about two minutes

All strategies use the same in-memory grid and the same clients, which hardly compute. CPU seconds are measured in one process in which the
strategies take turns, so that they meet the same load on a busy machine. They are user and system time, of the whole
process with its clients and messages, and of the server's thread alone. The first two rounds of a turn are left out. A ratio compares the
medians of one turn; printed are the median and the range of the ratios. Memory is the peak of a process of its own, beyond what it had
before training. FedAvg must give Flower's model.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time

KINDS = {"flower": "Flower's FedAvg", "FedAvg": "FedAvg", "MimiC": "MimiC"}
WARM_UP = 2  # rounds
Costs = dict[str, float]


def measure(kind: str, clients: int, size: int, rounds: int) -> Costs:
    """Train with one strategy in this process; returns CPU seconds per round and megabytes."""
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

    stamps = [(time.process_time(), time.thread_time())]

    def stamp(server_round: int, arrays: ArrayRecord) -> None:
        stamps.append((time.process_time(), time.thread_time()))

    strategy = FedAvg(fraction_evaluate=0.0) if kind == "flower" else getattr(mff, kind)(fraction_evaluate=0.0, wait_for=clients)
    initial = ArrayRecord({"w": Array(np.linspace(0, 1, size, dtype=np.float32))})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with mff.Federation(client, clients).running() as grid:
        result = strategy.start(grid, initial, rounds, 3600.0, evaluate_fn=stamp)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    # The first stamps are the start and the evaluation of the initial model.
    process, thread = (statistics.median(b[k] - a[k] for a, b in itertools.pairwise(stamps[1 + WARM_UP :])) for k in (0, 1))
    total = float(result.arrays["w"].numpy().astype(np.float64).sum())
    return {"process": process, "server thread": thread, "memory": used / 1024, "sum": total}


def measured_alone(kind: str, *sizes: int) -> Costs:
    """`measure` in a process of its own."""
    options = [f"--{name}={value}" for name, value in zip(("clients", "size", "rounds"), sizes, strict=True)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    command = [sys.executable, __file__, "--only", kind, *options]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    found: Costs = json.loads(out.strip().splitlines()[-1])
    return found


def show(turns: list[dict[str, Costs]], alone: dict[str, Costs]) -> None:
    """One line per strategy: the best CPU seconds, the ratios to Flower's, and the memory."""
    for kind, title in KINDS.items():
        parts = []
        for name in ("process", "server thread"):
            ratios = [turn[kind][name] / turn["flower"][name] for turn in turns]
            best = min(turn[kind][name] for turn in turns)
            parts.append(f"{name} {best:.3f} s ({statistics.median(ratios):.2f}x, {min(ratios):.2f} to {max(ratios):.2f})")
        used = alone[kind]["memory"]
        print(f"{title:16}", ", ".join([*parts, f"memory {used:.0f} MB ({used / alone['flower']['memory']:.2f}x)"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5, help="turns of every strategy")
    parser.add_argument("--only", help="measure one strategy in this process")
    given = parser.parse_args()
    sizes = (given.clients, given.size, given.rounds)
    if given.only:
        print(json.dumps(measure(given.only, *sizes)))
        return
    alone = {kind: measured_alone(kind, *sizes) for kind in KINDS}
    turns = [{kind: measure(kind, *sizes) for kind in KINDS} for _ in range(given.repeats)]
    assert abs(alone["FedAvg"]["sum"] - alone["flower"]["sum"]) < 1e-6 * given.size, "FedAvg differs from Flower's"
    print(f"{given.clients} clients, d = {given.size:,}, {given.rounds} rounds, {given.repeats} turns; per round:")
    show(turns, alone)


if __name__ == "__main__":
    main()
