"""SuperLink and three SuperNodes as real processes: killed, restarted and resumed, with the simulator's result at the end."""

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
from mimicfl.flower.new_app import new_app
from mimicfl.metrics.store import RunFolder
from tests.conftest import wait_until
from tests.flower.network import Network, hold_in, rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # a dozen processes, which a busy machine starts one after the other
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to find processes"),
]
N, ROUNDS = 3, 3
DOCS = Path(__file__).parents[2] / "docs" / "flower.md"
CONFIG = Path(__file__).parents[2] / "examples" / "deployment" / "nginx.conf"
NGINX = (shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")) if shutil.which("curl") else None


def simulated(available):
    """The template's problem in the simulator."""
    data = mf.datasets.load("digits")
    return mf.simulate(
        mf.models.build("mlp", data, seed=0),
        data,
        mf.partition.dirichlet(data.y_train, N, alpha=0.3, seed=0),
        "mimic",
        mf.availability.Explicit(np.array(available, dtype=bool)),
        len(available),
        local=mf.LocalSGD(epochs=1, batch_size=16, lr="geometric:0.1,0.99"),
        engine="plain",
    )


def test_killed_nodes_and_killed_server_app_recover(network, tmp_path):
    app, folder, gate = new_app(tmp_path / "digits-app"), tmp_path / "run", tmp_path / "gate"
    gate.mkdir()
    (gate / "hold-1").write_text("1")
    (gate / "hold-2").write_text("2")
    hold_in(app / "digits_app" / "task.py", "data", gate, folder)
    network.superlink()
    nodes = [network.supernode(k, N, cold=k == 0) for k in range(N)]
    settings = {"num-rounds": ROUNDS, "folder": str(folder), "timeout": 36000.0}
    try:
        network.run_app(app, **settings)
        # A SuperNode is killed during a round and restarted. It has no key, so Flower gives it a new node id.
        wait_until(lambda: (gate / "holding-1").exists(), "client 1 to be training in round 1")
        assert len(rows(folder)) == 1
        network.kill(nodes[1])
        (gate / "hold-1").unlink()
        nodes[1] = network.supernode(1, N)
        wait_until(lambda: len(rows(folder)) == 2, "the round to close without client 1")
        failed = rows(folder)[1]["failed"]
        assert failed.keys() == {"1"}
        assert "restarted" in failed["1"] or "offline" in failed["1"]  # on a slow machine Flower may notice the dead node first
        # The ServerApp is killed during a round; a new run with the same folder resumes.
        wait_until(lambda: (gate / "holding-2").exists(), "client 2 to be training in round 2")
        [server] = network.server_apps()
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not network.server_apps(), "the ServerApp to be gone")
        (gate / "hold-2").unlink()
        network.run_app(app, **settings)
        wait_until(lambda: (folder / "final.safetensors").exists(), "the resumed run to finish")
    except BaseException:  # including the timeout of the test
        print(network.logs())
        raise
    written = rows(folder)
    available = [[int(str(i) in row["answered"]) for i in range(N)] for row in written]
    assert len(written) == ROUNDS
    assert available == [[1, 1, 1], [1, 0, 1], [1, 1, 1]]
    tensors, facts = RunFolder(folder).load("checkpoint")
    expected = simulated(available)
    assert json.loads(facts["clients"]) == ["0", "1", "2"]
    assert torch.equal(tensors["state.w"], expected.params)
    assert written[-1]["test_accuracy"] == pytest.approx(expected.rows[-1]["test_accuracy"])
    vector = 4 * expected.params.numel()
    assert written[0]["bytes_up"] == written[0]["bytes_down"] == N * vector


def status(network, path):
    """The status code of a request through the proxy."""
    command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--path-as-is", "--cacert", network.tls / "ca.crt", "-X", "POST"]
    address = f"https://127.0.0.1:{network.node_port}/{path}"
    return int(subprocess.run([*map(str, command), address], capture_output=True, text=True).stdout)


def make_keys(folder, names):
    """Create certificates and keys with the commands of docs/flower.md."""
    folder.mkdir()
    [commands] = re.findall(r"```sh\n(openssl .*?)```", DOCS.read_text(), re.DOTALL)
    for name in names:
        subprocess.run(["bash", "-e"], input=commands.replace("client-0", name), text=True, cwd=folder, check=True, capture_output=True)
        commands = commands[commands.index("ssh-keygen") :]
    return folder


@pytest.mark.skipif(not all(map(shutil.which, ("openssl", "ssh-keygen"))), reason="needs openssl and ssh-keygen")
def test_secure_aggregation_with_authenticated_nodes_refuses_unregistered_nodes(tmp_path):
    """A secure round over TLS with three registered nodes; nodes with an unregistered key or without one cannot connect.

    Where there is nginx, the nodes connect through the proxy of docs/deployment.md, which exposes the fleet routes only.
    """
    app, folder = new_app(tmp_path / "digits-app"), tmp_path / "run"
    keys = make_keys(tmp_path / "keys", ["client-0", "client-1", "client-2", "unregistered"])
    with Network(tmp_path / "net", tls=keys) as network:
        network.superlink("--enable-supernode-auth", cold=True)
        if NGINX:
            network.proxy(NGINX, CONFIG)
            assert [status(network, path) for path in ("v1/control/list-runs", "", "v1/fleet/../control/list-runs")] == [403] * 3
            assert status(network, "v1/fleet/anything") != 403
        for k in range(N):
            code, out = network.flwr("supernode", "register", keys / f"client-{k}.pub", "loop")
            assert code == 0, out
        for k in range(N):
            state = {"state-dir": tmp_path / f"disk-{k}"}
            network.supernode(k, N, "--auth-supernode-private-key", keys / f"client-{k}", **state)
        settings = {"form": "secure", "clip": 256.0, "num-rounds": 1, "folder": str(folder), "timeout": 36000.0}
        network.run_app(app, **settings)
        unregistered = network.supernode(7, N, "--auth-supernode-private-key", keys / "unregistered")
        keyless = network.supernode(8, N)
        try:
            for node, who in ((unregistered, "the unregistered node"), (keyless, "the node without a key")):
                wait_until(lambda node=node: node.poll() is not None, f"{who} to be refused")
                assert node.returncode != 0
            code, listed = network.flwr("supernode", "list", "loop", "--format", "json")
            assert code == 0, listed
            assert listed.count('"online"') == N
            wait_until(lambda: (folder / "final.safetensors").exists(), "the secure run to finish")
        except BaseException:
            print(network.logs())
            raise
    written = rows(folder)
    assert [row["answered"] for row in written] == [["0", "1", "2"]]
    assert all(row["failed"] == {} for row in written)
    found = RunFolder(folder).load("checkpoint")[0]["state.w"]
    torch.testing.assert_close(found, simulated([[1] * N]).params, atol=2e-6, rtol=0)
    assert all(len(list((tmp_path / f"disk-{k}").rglob("*.safetensors"))) == 1 for k in range(N))
