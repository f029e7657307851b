"""Compares our round loop with Flower's, on a real SuperLink and three SuperNodes on loopback: seconds and bytes per round.

    python benchmarks/flower_rounds.py [--rounds 3] [--blocks 6] [--size 44426]        # about five minutes

Clients do almost no training, so the time of a round is the overhead: polling, processes and the network. In one run the two loops
alternate, a few rounds each, on the same nodes, so that other load on the machine affects both. Both must receive updates from all three
clients in every round. Bytes are counted by the strategy (numbers in arrays) and by Flower (all traffic through the SuperLink).
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.flower.network import Network, wait_until

NODES = 3
APP = {
    "pyproject.toml": """
[project]
name = "overhead"
version = "0.1.0"
dependencies = []
[tool.flwr.app]
publisher = "overhead"
[tool.flwr.app.components]
serverapp = "overhead.server_app:app"
clientapp = "overhead.client_app:app"
[tool.flwr.app.config]
order = ""
rounds = 1
size = 1
out = ""
""",
    "overhead/__init__.py": "",
    "overhead/client_app.py": """
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    w = message.content["arrays"]["w"].numpy()
    w = w * np.float32(0.99 - 0.001 * context.node_config["partition-id"])
    answer = {"arrays": ArrayRecord({"w": Array(w)}), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(answer), reply_to=message)
""",
    "overhead/server_app.py": """
import json, pathlib, time
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from mimicfl.flower import MimiC

app = ServerApp()

class Theirs(FedAvg):
    counted = ()
    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.counted = (*self.counted, sum(not r.has_error() for r in replies))
        return super().aggregate_train(server_round, replies)

@app.main()
def main(grid, context):
    said = context.run_config
    found = []
    model = ArrayRecord({"w": Array(np.random.default_rng(0).standard_normal(said["size"], dtype=np.float32))})
    while len(list(grid.get_node_ids())) < 3:
        time.sleep(0.2)
    for loop in said["order"].split(","):
        ticks = []
        if loop == "flower":
            strategy = Theirs(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
        else:
            strategy = MimiC(fraction_evaluate=0.0, wait_for=3, client_ids="node")
        result = strategy.start(grid, model, said["rounds"], evaluate_fn=lambda *_: ticks.append(time.monotonic()))
        model = result.arrays
        rows = getattr(strategy, "rows", [])
        counted = [row["active"] for row in rows] or list(strategy.counted)
        found.append({"loop": loop, "ticks": ticks, "counted": counted, "rows": [[r["bytes_up"], r["bytes_down"]] for r in rows]})
    pathlib.Path(said["out"]).write_text(json.dumps(found))
""",
}


def traffic(network: Network) -> dict[str, tuple[int, int]]:
    """Return the bytes in and out of the SuperLink per run, as Flower counts them."""
    kinds = ("inbound-bytes", "outbound-bytes")
    return {run["run-id"]: tuple(run["network-traffic"][kind] for kind in kinds) for run in network.runs()}


def measure(network: Network, app: Path, order: list[str], rounds: int, size: int, out: Path) -> tuple[list[dict], list[float]]:
    """Run these blocks; return their results and the bytes in and out of the SuperLink."""
    before = set(traffic(network))
    network.run_app(app, order=",".join(order), rounds=rounds, size=size, out=str(out))
    wait_until(out.exists, f"{len(order)} blocks of {rounds} rounds")
    time.sleep(1)
    blocks = json.loads(out.read_text())
    for block in blocks:
        assert block["counted"] == [NODES] * rounds, block
    [run] = set(after := traffic(network)) - before
    return blocks, [count / rounds / len(order) for count in after[run]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3, help="rounds per block")
    parser.add_argument("--blocks", type=int, default=6, help="blocks per loop")
    parser.add_argument("--size", type=int, default=44426, help="number of parameters (default: LeNet's)")
    options = parser.parse_args()
    order = [loop for k in range(options.blocks) for loop in (("flower", "mimicfl") if k % 2 == 0 else ("mimicfl", "flower"))]
    with tempfile.TemporaryDirectory() as folder, Network(Path(folder) / "net") as network:
        app = Path(folder) / "app"
        for name, text in APP.items():
            (app / name).parent.mkdir(parents=True, exist_ok=True)
            (app / name).write_text(text)
        network.superlink()
        for k in range(NODES):
            network.supernode(k, NODES)
        sent = {loop: measure(network, app, [loop], 2, options.size, Path(folder) / f"{loop}.json")[1] for loop in ("flower", "mimicfl")}
        blocks, _ = measure(network, app, order, options.rounds, options.size, Path(folder) / "both.json")
    print(f"{NODES} SuperNodes, {options.size} float32, {options.blocks} blocks of {options.rounds} rounds each, alternating")
    medians = {}
    for loop in ("flower", "mimicfl"):
        seconds = [b - a for block in blocks if block["loop"] == loop for a, b in itertools.pairwise(block["ticks"])]
        print(f"  {loop:8}", " ".join(f"{s:.1f}" for s in seconds))
        medians[loop] = statistics.median(seconds)
        spread = f"median {medians[loop]:.2f} s per round (lowest {min(seconds):.2f}, highest {max(seconds):.2f}, n = {len(seconds)})"
        print(f"           {spread}; through the SuperLink {sent[loop][0]:,.0f} bytes in, {sent[loop][1]:,.0f} out per round")
    vectors = NODES * 4 * options.size
    [up, down] = [count / options.rounds for count in next(b for b in blocks if b["loop"] == "mimicfl")["rows"][-1]]
    print(f"  mimicfl / flower {medians['mimicfl'] / medians['flower']:.2f}; counted {up:,.0f} bytes up, {down:,.0f} down per round")
    assert up == down == vectors, f"expected {vectors} bytes up and down, got {up} and {down}"


if __name__ == "__main__":
    main()
