"""Our round loop beside Flower's own, on a real SuperLink and three SuperNodes on loopback: seconds and bytes a round.

    python benchmarks/flower_rounds.py [--rounds 3] [--blocks 6] [--size 44426]        # about five minutes

Clients train next to nothing, so a round costs what the machinery costs: polling, processes, the network. Within one run the two
loops take turns, a few rounds each, with the same nodes, so that whatever else the machine does falls on both. Both must have
counted all three clients in every round. Bytes are counted by the strategy (numbers in arrays) and by Flower (all that passed the
SuperLink).
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
    """Bytes in and out of the SuperLink, by run, as Flower counts them."""
    _, text = network.flwr("list", "loop", "--format", "json")
    runs = json.loads(text[text.index("{") :])["runs"]
    return {run["run-id"]: (run["network-traffic"]["inbound-bytes"], run["network-traffic"]["outbound-bytes"]) for run in runs}


def measure(network: Network, app: Path, order: list[str], rounds: int, size: int, out: Path) -> tuple[list[dict], list[float]]:
    """Run these blocks; returns them, and the bytes that went in and out of the SuperLink."""
    before = set(traffic(network))
    network.run_app(app, order=",".join(order), rounds=rounds, size=size, out=str(out))
    wait_until(out.exists, 120 + 60 * rounds * len(order), f"{len(order)} blocks of {rounds} rounds")
    time.sleep(1)
    blocks = json.loads(out.read_text())
    for block in blocks:
        assert block["counted"] == [NODES] * rounds, block
    [run] = set(after := traffic(network)) - before
    return blocks, [count / rounds / len(order) for count in after[run]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a block")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of each loop")
    parser.add_argument("--size", type=int, default=44426, help="numbers in the model (default: LeNet's)")
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
    print(f"{NODES} SuperNodes, {options.size} float32, {options.blocks} blocks of {options.rounds} rounds each, in turns")
    medians = {}
    for loop in ("flower", "mimicfl"):
        seconds = [b - a for block in blocks if block["loop"] == loop for a, b in itertools.pairwise(block["ticks"])]
        print(f"  {loop:8}", " ".join(f"{s:.1f}" for s in seconds))
        medians[loop] = statistics.median(seconds)
        spread = f"median {medians[loop]:.2f} s a round (lowest {min(seconds):.2f}, highest {max(seconds):.2f}, n = {len(seconds)})"
        print(f"           {spread}; through the SuperLink {sent[loop][0]:,.0f} bytes in, {sent[loop][1]:,.0f} out a round")
    vectors = NODES * 4 * options.size
    [up, down] = [count / options.rounds for count in next(b for b in blocks if b["loop"] == "mimicfl")["rows"][-1]]
    print(f"  mimicfl / flower {medians['mimicfl'] / medians['flower']:.2f}; counted {up:,.0f} bytes up, {down:,.0f} down a round")
    assert up == down == vectors, f"MimiC's own count is {vectors}"


if __name__ == "__main__":
    main()
