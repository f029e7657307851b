"""SuperLink and three SuperNodes as real processes: killed, brought back, resumed, and equal to the simulator in the end."""

import json
import os
import signal
import sys

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl.flower.new import new_app
from mimicfl.metrics.store import RunFolder

from .network import Network, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
N, ROUNDS = 3, 4

# What the template's client does, and in between a place to be killed at: where a file `hold-<client>` lies, data() waits.
HOLD = """

def data(context, real=data):
    import pathlib, time
    gate = pathlib.Path({folder!r})
    me = context.node_config["partition-id"]
    if (gate / f"hold-{{me}}").exists():
        (gate / f"holding-{{me}}").touch()
        for _ in range(600):
            if not (gate / f"hold-{{me}}").exists():
                break
            time.sleep(0.1)
    return real(context)
"""


@pytest.fixture
def network(tmp_path):
    with Network(tmp_path / "net") as network:
        yield network
    assert all(process.poll() is not None for process in network.processes)


def rows(folder):
    file = folder / "rows.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def simulated(available):
    """The template's problem in the simulator."""
    data = mf.datasets.load("digits")
    return mf.simulate(
        mf.models.build("mlp", data, seed=0),
        data,
        mf.partition.shards(data.y_train, N, 4, seed=0),
        "mimic",
        mf.availability.Explicit(np.array(available, dtype=bool)),
        len(available),
        local=mf.LocalSGD(epochs=1, batch_size=16, lr="geometric:0.1,0.99"),
        engine="plain",
    )


def test_killed_nodes_and_server_apps_lose_nothing(network, tmp_path):
    app, folder, gate = new_app(tmp_path / "digits-app"), tmp_path / "run", tmp_path / "gate"
    gate.mkdir()
    task = app / "digits_app" / "task.py"
    task.write_text(task.read_text() + HOLD.format(folder=str(gate)))
    network.superlink()
    nodes = [network.supernode(k, N) for k in range(N)]
    settings = {"num-rounds": ROUNDS, "folder": str(folder), "timeout": 90.0}
    try:
        network.run_app(app, **settings)
        # A SuperNode dies in the middle of a round and comes back, without a key: Flower takes it for a new node.
        wait_until(lambda: len(rows(folder)) >= 1, 120, "the first round")
        (gate / "hold-1").touch()
        wait_until(lambda: (gate / "holding-1").exists(), 60, "client 1 to be training")
        before = len(rows(folder))
        network.kill(nodes[1])
        (gate / "hold-1").unlink()
        nodes[1] = network.supernode(1, N)
        wait_until(lambda: len(rows(folder)) > before, 120, "the round to close without client 1")
        assert rows(folder)[before]["answered"] == ["0", "2"]
        # The server application dies in the middle of a round; a new run goes on where it was.
        (gate / "hold-2").touch()
        wait_until(lambda: (gate / "holding-2").exists(), 60, "client 2 to be training")
        [server] = network.server_apps()
        done = len(rows(folder))
        assert done < ROUNDS
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not network.server_apps(), 10, "the ServerApp to be gone")
        (gate / "hold-2").unlink()
        network.run_app(app, **settings)
        wait_until(lambda: (folder / "final.safetensors").exists(), 180, "the resumed run to finish")
    except (AssertionError, ValueError):
        print(network.logs())
        raise
    kept = rows(folder)
    available = [[int(str(i) in row["answered"]) for i in range(N)] for row in kept]
    assert len(kept) == ROUNDS
    assert available[0] == [1, 1, 1]
    assert [1, 0, 1] in available
    assert available[-1] == [1, 1, 1]
    tensors, facts = RunFolder(folder).load("checkpoint")
    expected = simulated(available)
    assert json.loads(facts["clients"]) == ["0", "1", "2"]
    assert torch.equal(tensors["state.w"], expected.params)
    assert kept[-1]["test_accuracy"] == pytest.approx(expected.rows[-1]["test_accuracy"])
    vector = 4 * expected.params.numel()
    assert kept[0]["bytes_up"] == kept[0]["bytes_down"] == N * vector
