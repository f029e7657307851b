"""A sweep over a real Ray cluster on this machine: same results, a killed worker's runs are resumed."""

import os
import signal
import subprocess
import sys

import pytest
import torch

import mimicfl as mf
from mimicfl.experiments import cluster
from mimicfl.metrics.history import read
from mimicfl.metrics.store import RunFolder
from tests.conftest import wait_until

GRID = """
rounds = 12
num_clients = 6
checkpoint_every = 1
engine = "plain"
plugins = ["held.py"]
[grid]
algorithm = ["fedavg", "held"]
seed = 2
"""
# FedAvg that stops in its fourth round while the file `hold` is there, and tells which process that is.
HELD = """
import os, pathlib, time
import mimicfl as mf

HERE = pathlib.Path(__file__).parent

@mf.register("held")
class ClientState(mf.FedAvg):
    def aggregate(self, state, active, g, step):
        if step.t == 3 and (HERE / "hold").exists():
            (HERE / f"held-{os.getpid()}").touch()
            while (HERE / "hold").exists():
                time.sleep(0.05)
        super().aggregate(state, active, g, step)
"""


@pytest.mark.slow
def test_runs_of_a_killed_worker_are_resumed(tmp_path):
    (tmp_path / "grid.toml").write_text(GRID)
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    command = [sys.executable, "-m", "mimicfl", "sweep", "grid.toml", "--ray", "local", "--out", "out"]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            held = wait_until(lambda: process.poll() is not None or list(tmp_path.glob("held-*")), "a worker in its fourth round")
            assert process.poll() is None, (tmp_path / "log").read_text()
            os.kill(int(held[0].name.partition("-")[2]), signal.SIGKILL)
            (tmp_path / "hold").unlink()
            process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    out = (tmp_path / "log").read_text()
    assert process.returncode == 0, out
    assert " groups for " in out
    assert "a worker died: its" in out
    assert not list((tmp_path / "out").glob(".sweep-*"))
    for algorithm in ("fedavg", "held"):
        for seed in (0, 1):
            folder = RunFolder(tmp_path / "out" / f"{algorithm}-s{seed}")
            alone = mf.run(mf.Experiment(rounds=12, num_clients=6, algorithm="fedavg", seed=seed, engine="plain"))
            assert torch.equal(read(folder).params, alone.params)


def test_a_worker_elsewhere_sends_its_folders_back(tmp_path):
    """Without the sender's token in the folder, the files travel in the answer."""
    import json

    e = mf.Experiment(rounds=2, num_clients=6)
    failure, files = cluster.work(json.dumps({"cell/mimic-s0": e.to_dict()}), str(tmp_path / "not here"), "token")
    assert failure == ""
    assert {"cell/mimic-s0/config.toml", "cell/mimic-s0/rows.jsonl", "cell/mimic-s0/final.safetensors"} <= set(files)
    assert not (tmp_path / "not here").exists()


def test_groups_are_cut_for_the_workers():
    names = [str(k) for k in range(9)]
    assert cluster._spread([names], 1) == [names]
    assert sorted(map(len, cluster._spread([names], 4))) == [2, 2, 2, 3]
    assert sorted(map(len, cluster._spread([["a"], ["b"]], 5))) == [1, 1]


def test_missing_ray_or_cluster_is_a_user_mistake(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(mf.UsageError, match=r"pip install 'mimicfl\[ray\]'"):
        cluster.run_plan_on("auto", {"a": mf.Experiment(rounds=1)}, tmp_path, print)
