"""Our round loop beside Flower's own, on a real SuperLink and three SuperNodes on loopback: seconds and bytes a round.

    python benchmarks/flower_rounds.py [--rounds 5] [--repeats 3] [--size 44426]        # about five minutes

Clients return the model as it is, so a round costs what the machinery costs: polling, processes, the network. The two loops take
turns on the same SuperLink. Before anything is timed, both must have counted all three clients in every round. Bytes are counted
by the strategy (numbers in arrays) and by Flower (everything that passed the SuperLink).
"""

import argparse
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
loop = ""
rounds = 1
size = 1
out = ""
""",
    "overhead/__init__.py": "",
    "overhead/client_app.py": """
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    answer = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(answer), reply_to=message)

@app.query()
def hello(message, context):
    told = ConfigRecord({"client-id": str(context.node_config["partition-id"])})
    return Message(RecordDict({"mimicfl": told}), reply_to=message)
""",
    "overhead/server_app.py": """
import json, pathlib, time
import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from mimicfl.flower import MimiC

app = ServerApp()

@app.main()
def main(grid, context):
    said = context.run_config
    ticks, counted = [], []
    model = ArrayRecord({"w": Array(np.random.default_rng(0).standard_normal(said["size"], dtype=np.float32))})

    def tick(server_round, arrays):
        ticks.append(time.monotonic())

    class Counting(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            counted.append(sum(not r.has_error() for r in replies))
            return super().aggregate_train(server_round, replies)

    if said["loop"] == "flower":
        strategy = Counting(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    else:
        strategy = MimiC(fraction_evaluate=0.0, wait_for=3)
    strategy.start(grid, model, said["rounds"], evaluate_fn=tick)
    rows = getattr(strategy, "rows", [])
    counted += [row["active"] for row in rows]
    found = {"ticks": ticks, "counted": counted, "rows": [[row["bytes_up"], row["bytes_down"]] for row in rows]}
    pathlib.Path(said["out"]).write_text(json.dumps(found))
""",
}


def traffic(network: Network) -> dict[str, tuple[int, int]]:
    """Bytes in and out of the SuperLink, by run, as Flower counts them."""
    _, text = network.flwr("list", "loop", "--format", "json")
    runs = json.loads(text[text.index("{") :])["runs"]
    return {run["run-id"]: (run["network-traffic"]["inbound-bytes"], run["network-traffic"]["outbound-bytes"]) for run in runs}


def measure(network: Network, app: Path, loop: str, rounds: int, size: int, out: Path) -> dict:
    before = set(traffic(network))
    network.run_app(app, loop=loop, rounds=rounds, size=size, out=str(out))
    wait_until(out.exists, 120 + 60 * rounds, f"{rounds} rounds of {loop}")
    time.sleep(1)
    found = json.loads(out.read_text())
    assert found["counted"] == [NODES] * rounds, found["counted"]
    [run] = set(after := traffic(network)) - before
    return {
        "seconds": [b - a for a, b in zip(found["ticks"][1:], found["ticks"][2:], strict=False)],  # the first round waits for the nodes
        "traffic": [count / rounds for count in after[run]],
        "counted": [count / rounds for count in found["rows"][-1]] if found["rows"] else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--size", type=int, default=44426, help="numbers in the model (default: LeNet's)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Network(Path(folder) / "net") as network:
        app = Path(folder) / "app"
        for name, text in APP.items():
            (app / name).parent.mkdir(parents=True, exist_ok=True)
            (app / name).write_text(text)
        network.superlink()
        for k in range(NODES):
            network.supernode(k, NODES)
        found: dict[str, list[dict]] = {"flower": [], "mimicfl": []}
        for repeat in range(options.repeats):
            for loop in found if repeat % 2 == 0 else reversed(found):
                out = Path(folder) / f"{loop}-{repeat}.json"
                found[loop].append(measure(network, app, loop, options.rounds, options.size, out))
                print(loop, " ".join(f"{s:.2f}" for s in found[loop][-1]["seconds"]), flush=True)
    print(f"\n{NODES} SuperNodes, {options.size} float32, all rounds but each run's first:")
    for loop, runs in found.items():
        seconds = [s for run in runs for s in run["seconds"]]
        up, down = (statistics.mean(run["traffic"][k] for run in runs) for k in (0, 1))
        spread = f"{statistics.median(seconds):.2f} s a round (lowest {min(seconds):.2f}, highest {max(seconds):.2f}, n = {len(seconds)})"
        print(f"  {loop:8} {spread}; through the SuperLink {up:,.0f} bytes in, {down:,.0f} out a round")
    ratio = statistics.median(s for r in found["mimicfl"] for s in r["seconds"]) / statistics.median(
        s for r in found["flower"] for s in r["seconds"]
    )
    vectors = NODES * 4 * options.size
    up, down = found["mimicfl"][0]["counted"]
    print(f"  mimicfl / flower: {ratio:.2f}; numbers counted: {up:,.0f} bytes up, {down:,.0f} down a round; own count: {vectors:,} each")
    assert up == down == vectors


if __name__ == "__main__":
    main()
