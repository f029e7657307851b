"""A sweep over a real Ray cluster on this machine: same results, a killed worker's runs are taken up again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import mimicfl as mf
from mimicfl.metrics.history import read
from mimicfl.metrics.store import RunFolder
from mimicfl.sweep import cluster

GRID = """
rounds = {rounds}
num_clients = 6
checkpoint_every = 1
engine = "plain"
[grid]
algorithm = ["fedavg", "mimic"]
seed = 2
"""


def workers_at_work():
    """Ray names the processes that are working on a task after it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::work"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds the workers in /proc")
def test_a_killed_workers_runs_are_taken_up_again(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "grid.toml").write_text(GRID.format(rounds=60))
    command = [sys.executable, "-m", "mimicfl", "sweep", "grid.toml", "--ray", "local", "--out", "out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 150
        while not (rows := list(tmp_path.glob("out/*/rows.jsonl"))) or max(len(file.read_bytes().splitlines()) for file in rows) < 3:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(workers_at_work()[0], signal.SIGKILL)
        out, _ = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out
    assert " groups for " in out
    assert "a worker died: its" in out
    assert not list((tmp_path / "out").glob(".sweep-*"))
    for algorithm in ("fedavg", "mimic"):
        for seed in (0, 1):
            folder = RunFolder(tmp_path / "out" / f"{algorithm}-s{seed}")
            alone = mf.run(mf.Experiment(rounds=60, num_clients=6, algorithm=algorithm, seed=seed, engine="plain"))
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


def test_no_ray_and_no_cluster_are_told_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(mf.UsageError, match=r"pip install 'mimicfl\[ray\]'"):
        cluster.carry_out_on("auto", {"a": mf.Experiment(rounds=1)}, tmp_path, print)
