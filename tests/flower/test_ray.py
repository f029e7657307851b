"""Availability patterns in Flower's own simulation on Ray."""

import numpy as np
import pytest
import torch

import mimicfl as mf
import mimicfl.flower as mff
from mimicfl.metrics.store import RunFolder
from tests.flower.problems import N, app, problem, simulated


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_availability_pattern_selects_the_virtual_clients(tmp_path):
    from flwr.simulation import run_simulation

    settings = {"num_rounds": 5, "timeout": 3600.0, "lr": "geometric:0.05,0.8", "num_clients": N, "availability": "static:0.6", "seed": 2}
    server = mff.server_app(lambda: problem()[2], folder=tmp_path / "run", **settings)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}}
    run_simulation(server_app=server, client_app=app(), num_supernodes=N, backend_config=resources)
    available = mf.availability.schedule("static:0.6", 5, N, seed=2)
    folder = RunFolder(tmp_path / "run")
    found = [[str(i) in row["answered"] for i in range(N)] for row in folder.rows()]
    assert np.array_equal(np.array(found), available)
    expected = simulated("mimic", available, seed=2).params
    torch.testing.assert_close(folder.load("final")[0]["params"], expected, atol=1e-6, rtol=0)
