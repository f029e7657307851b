"""SuperLink and three SuperNodes as real processes: killed, brought back, resumed, and equal to the simulator in the end."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl.flower.new import new_app
from mimicfl.metrics.store import RunFolder

from ..conftest import wait_until
from .network import Network

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
N, ROUNDS = 3, 3
DOCS = Path(__file__).parents[2] / "docs" / "flower.md"

# What the template's client does, and in between a place to be killed at: a file `hold-<client>` names the round in which it waits.
HOLD = """

def data(context, real=data):
    import pathlib, time
    gate, rows = pathlib.Path({gate!r}), pathlib.Path({rows!r})
    me = context.node_config["partition-id"]
    done = len(rows.read_text().splitlines()) if rows.exists() else 0
    hold = gate / f"hold-{{me}}"
    if hold.exists() and int(hold.read_text()) == done:
        (gate / f"holding-{{me}}").touch()
        while hold.exists():
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
    (gate / "hold-1").write_text("1")
    (gate / "hold-2").write_text("2")
    task = app / "digits_app" / "task.py"
    task.write_text(task.read_text() + HOLD.format(gate=str(gate), rows=str(folder / "rows.jsonl")))
    network.superlink()
    nodes = [network.supernode(k, N) for k in range(N)]
    settings = {"num-rounds": ROUNDS, "folder": str(folder), "timeout": 36000.0}
    try:
        network.run_app(app, **settings)
        # A SuperNode dies in the middle of a round and comes back, without a key: Flower takes it for a new node.
        wait_until(lambda: (gate / "holding-1").exists(), "client 1 to be training in round 1")
        assert len(rows(folder)) == 1
        network.kill(nodes[1])
        (gate / "hold-1").unlink()
        nodes[1] = network.supernode(1, N)
        wait_until(lambda: len(rows(folder)) == 2, "the round to close without client 1")
        assert rows(folder)[1]["failed"] == {"1": "it went away and came back"}
        # The server application dies in the middle of a round; a new run goes on where it was.
        wait_until(lambda: (gate / "holding-2").exists(), "client 2 to be training in round 2")
        [server] = network.server_apps()
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not network.server_apps(), "the ServerApp to be gone")
        (gate / "hold-2").unlink()
        network.run_app(app, **settings)
        wait_until(lambda: (folder / "final.safetensors").exists(), "the resumed run to finish")
    except BaseException:  # a timeout of the test included
        print(network.logs())
        raise
    kept = rows(folder)
    available = [[int(str(i) in row["answered"]) for i in range(N)] for row in kept]
    assert len(kept) == ROUNDS
    assert available == [[1, 1, 1], [1, 0, 1], [1, 1, 1]]
    tensors, facts = RunFolder(folder).load("checkpoint")
    expected = simulated(available)
    assert json.loads(facts["clients"]) == ["0", "1", "2"]
    assert torch.equal(tensors["state.w"], expected.params)
    assert kept[-1]["test_accuracy"] == pytest.approx(expected.rows[-1]["test_accuracy"])
    vector = 4 * expected.params.numel()
    assert kept[0]["bytes_up"] == kept[0]["bytes_down"] == N * vector


def make_keys(folder, names):
    """Certificates and keys by the very commands that docs/flower.md gives."""
    folder.mkdir()
    [commands] = re.findall(r"```sh\n(openssl .*?)```", DOCS.read_text(), re.DOTALL)
    for name in names:
        subprocess.run(["bash", "-e"], input=commands.replace("client-0", name), text=True, cwd=folder, check=True, capture_output=True)
        commands = commands[commands.index("ssh-keygen") :]
    return folder


@pytest.mark.skipif(not all(map(shutil.which, ("openssl", "ssh-keygen"))), reason="needs openssl and ssh-keygen")
def test_keys_secure_aggregation_and_a_stranger(tmp_path):
    """TLS, authenticated nodes, corrections on the clients' disks, sums only for the server; strangers get in nowhere."""
    app, folder = new_app(tmp_path / "digits-app"), tmp_path / "run"
    keys = make_keys(tmp_path / "keys", ["client-0", "client-1", "client-2", "stranger"])
    with Network(tmp_path / "net", tls=keys) as network:
        network.superlink("--enable-supernode-auth")
        for k in range(N):
            code, out = network.flwr("supernode", "register", keys / f"client-{k}.pub", "loop")
            assert code == 0, out
        for k in range(N):
            state = {"state-dir": tmp_path / f"disk-{k}"}
            network.supernode(k, N, "--auth-supernode-private-key", keys / f"client-{k}", **state)
        settings = {"form": "secure", "clip": 256.0, "num-rounds": 1, "folder": str(folder), "timeout": 36000.0}
        network.run_app(app, **settings)
        foreign = network.supernode(7, N, "--auth-supernode-private-key", keys / "stranger")
        keyless = network.supernode(8, N)
        try:
            for node, who in ((foreign, "the stranger"), (keyless, "the node without a key")):
                wait_until(lambda node=node: node.poll() is not None, f"{who} to be turned away")
                assert node.returncode != 0
            code, listed = network.flwr("supernode", "list", "loop", "--format", "json")
            assert code == 0, listed
            assert listed.count('"online"') == N
            wait_until(lambda: (folder / "final.safetensors").exists(), "the secure run to finish")
        except BaseException:
            print(network.logs())
            raise
    kept = rows(folder)
    assert [row["answered"] for row in kept] == [["0", "1", "2"]]
    assert all(row["failed"] == {} for row in kept)
    found = RunFolder(folder).load("checkpoint")[0]["state.w"]
    torch.testing.assert_close(found, simulated([[1] * N]).params, atol=2e-6, rtol=0)
    assert all(len(list((tmp_path / f"disk-{k}").rglob("*.safetensors"))) == 1 for k in range(N))
