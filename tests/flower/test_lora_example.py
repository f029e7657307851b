"""examples/flower_lora: only adapters travel, MimiC learns under dropouts, and a resumed run continues."""

import importlib
import sys

import pytest

import mimicfl as mf
import mimicfl.flower as mff
from tests.conftest import ROOT


@pytest.mark.slow
def test_adapters_travel_and_the_model_learns(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "flower_lora"))
    for name in [name for name in sys.modules if name.startswith("flower_lora")]:
        monkeypatch.delitem(sys.modules, name)
    task, client, server = (importlib.import_module(f"flower_lora.{name}") for name in ("task", "client_app", "server_app"))
    config = {
        "num-clients": 3,
        "wait-for": 3,
        "lr": 0.2,
        "algorithm": "mimic",
        "availability": "static:0.7",
        "folder": str(tmp_path / "run"),
    }
    for rounds in (2, 5):
        mff.simulate(server.app, client.app, 3, config | {"num-rounds": rounds})
    rows = mf.read(tmp_path / "run").rows
    model = task.model()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained < 0.35 * sum(p.numel() for p in model.parameters())
    assert rows[-1]["bytes_up"] == 4 * trained * sum(row["active"] for row in rows)
    assert len(rows) == 5
    assert min(row["active"] for row in rows) < 3
    assert rows[-1]["test_perplexity"] < 0.8 * rows[0]["test_perplexity"]
