"""examples/flower_lora: only adapters travel, MimiC learns under dropouts, and a resumed run continues."""

import importlib
import shutil
import sys

import pytest
import torch

import mimicfl as mf
import mimicfl.flower as mff
from mimicfl.flower.checkpoints import CheckpointStore
from mimicfl.metrics.store import RunFolder
from tests.conftest import ROOT, wait_until
from tests.flower.network import hold_in, rows

APP = ROOT / "examples" / "flower_lora"
N = 3


def imported(monkeypatch, *names):
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(APP))
    for name in [name for name in sys.modules if name.startswith("flower_lora")]:
        monkeypatch.delitem(sys.modules, name)
    return [importlib.import_module(f"flower_lora.{name}") for name in names]


def trained_parameters(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.slow
def test_adapters_travel_and_the_model_learns(tmp_path, monkeypatch):
    task, client, server = imported(monkeypatch, "task", "client_app", "server_app")
    config = {
        "num-clients": N,
        "wait-for": N,
        "lr": 0.2,
        "algorithm": "mimic",
        "availability": "static:0.7",
        "folder": str(tmp_path / "run"),
    }
    for rounds in (2, 5):
        mff.simulate(server.app, client.app, N, config | {"num-rounds": rounds})
    rows = mf.read(tmp_path / "run").rows
    model = task.model()
    trained = trained_parameters(model)
    assert trained < 0.35 * sum(p.numel() for p in model.parameters())
    assert rows[-1]["bytes_up"] == 4 * trained * sum(row["active"] for row in rows)
    assert len(rows) == 5
    assert min(row["active"] for row in rows) < N
    assert rows[-1]["test_perplexity"] < 0.8 * rows[0]["test_perplexity"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to find processes")
def test_a_killed_supernode_rejoins_with_its_correction(network, tmp_path, monkeypatch):
    """On a real SuperLink with three SuperNodes; one is killed while it trains in round 1 and comes back under a new node id."""
    trained = trained_parameters(imported(monkeypatch, "task")[0].model())
    app, folder, gate = tmp_path / "app", tmp_path / "run", tmp_path / "gate"
    shutil.copytree(APP, app, ignore=shutil.ignore_patterns("__pycache__"))
    hold_in(app / "flower_lora" / "task.py", "data", gate, folder)
    for client in (1, 2):  # client 2 waits until client 1 is back, however long that takes
        (gate / f"hold-{client}").write_text("1")
    network.superlink()
    nodes = [network.supernode(k, N) for k in range(N)]
    try:
        network.run_app(app, **{"num-rounds": 3, "folder": str(folder), "timeout": 36000.0})
        wait_until(lambda: (gate / "holding-1").exists(), "client 1 to be training in round 1")
        network.kill(nodes[1])
        (gate / "hold-1").unlink()
        network.supernode(1, N)
        wait_until(lambda: "client 1 reconnected" in network.run_log(), "the new node to be known", every=1.0)
        (gate / "hold-2").unlink()
        wait_until(lambda: (folder / "final.safetensors").exists(), "the run to finish")
    except BaseException:  # including the timeout of the test
        print(network.logs())
        raise
    written = rows(folder)
    assert [row["active"] for row in written] == [3, 2, 3], written
    assert written[1]["failed"].keys() == {"1"}
    assert [row["bytes_up"] for row in written] == [4 * trained * count for count in (3, 5, 8)]  # only adapters travel
    corrections = CheckpointStore(RunFolder(folder)).load()[0]["state.c.rows"]
    assert float(corrections.norm()) > 0
    torch.testing.assert_close(corrections.sum(dim=0), torch.zeros(corrections.shape[1]), atol=1e-5, rtol=0)
    assert written[-1]["test_perplexity"] < written[0]["test_perplexity"]
