"""Temporary files, full disks, and the limit on open files."""

import os
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl import files
from mimicfl.algorithms import client_memory
from mimicfl.data.partition import dirichlet
from mimicfl.experiments import execute
from mimicfl.experiments.execute import run_plan


def test_temporary_files_of_a_killed_checkpoint_are_removed(tmp_path):
    """safetensors writes to a temporary file first, which remains if the process is killed."""
    e = mf.Experiment(rounds=2, num_clients=6, epochs=1)
    mf.run(e, tmp_path)
    (tmp_path / "final.safetensors").unlink()
    (tmp_path / ".tmpAb3dEf").write_text("half a checkpoint")
    mf.run(e, tmp_path)
    assert not list(tmp_path.glob(".tmp*"))


def test_remove_dead_removes_only_files_of_ended_processes(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, alive = (tmp_path / f".curves.png.{process}-0123abcd.part" for process in (ended.pid, os.getpid()))
    for file in (dead, alive, tmp_path / ".other.part"):
        file.write_text("half")
    files.remove_dead(tmp_path)
    assert not dead.exists()
    assert alive.exists()
    assert (tmp_path / ".other.part").exists()


def test_memory_mapped_state_allocates_disk_space_at_creation(tmp_path, monkeypatch):
    """On a full disk, writing to an unallocated part of a sparse file would kill the process."""

    def full(descriptor, begin, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(client_memory.os, "posix_fallocate", full)
    with pytest.raises(mf.UsageError, match="No space left"):
        mf.run(mf.Experiment(rounds=2, num_clients=6, epochs=1, state_budget="0"), tmp_path)
    monkeypatch.undo()
    assert len(mf.run(mf.Experiment(rounds=2, num_clients=6, epochs=1, state_budget="0"), tmp_path).rows) == 2


def test_more_runs_than_open_files_train_in_groups(tmp_path, monkeypatch):
    """Runs are trained in groups if the limit on open files is too low for all of them."""
    monkeypatch.setattr(execute, "open_files", lambda: execute.SPARE_FILES + 2)
    base = mf.Experiment(rounds=1, num_clients=4, steps=1, availability="always")
    plan = {str(seed): mf.Experiment(**{**base.to_dict(), "seed": seed}) for seed in range(5)}
    notices = []
    found = run_plan(plan, tmp_path, notice=notices.append)
    assert len(found) == 5
    assert len(notices) == 3  # one engine per group of two runs


@pytest.mark.slow
def test_a_run_keeps_only_its_lock_file_open(tmp_path):
    """The file with the rows is opened only to append a row."""
    program = """
import os, sys, mimicfl as mf
e = mf.Experiment(rounds=3, num_clients=4, steps=1, availability="always")
seen = []
mf.run(e, sys.argv[1], progress=lambda *_: seen.append(len(os.listdir("/proc/self/fd"))))
print(max(seen) - len(os.listdir("/proc/self/fd")))
"""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not list open files")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_open_files_raises_the_limit():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        assert files.open_files() == min(before[1] if before[1] != resource.RLIM_INFINITY else files.MANY_FILES, files.MANY_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_dirichlet_equals_its_definition():
    """For each class, proportions are drawn first, then the samples are shuffled and split."""
    y = np.arange(300) % 3
    split = dirichlet(y, 5, alpha=2.0, seed=4)
    rng = mf.seeds.stream(4, "partition", 0)
    parts = [[] for _ in range(5)]
    for label in range(3):
        pool = np.flatnonzero(y == label)
        cuts = (np.cumsum(rng.dirichlet(np.full(5, 2.0)))[:-1] * len(pool)).astype(int)
        for client, piece in enumerate(np.split(rng.permutation(pool), cuts)):
            parts[client].append(piece)
    assert all(np.array_equal(a, np.sort(np.concatenate(b))) for a, b in zip(split, parts, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        lambda: mf.run([]),
        lambda: mf.run(mf.Experiment(rounds=1), progress=3),
        lambda: mf.compare(mf.Experiment(rounds=1), out=torch.tensor(2)),
        lambda: mf.compare(mf.Experiment(rounds=1), seeds=torch.tensor(2)),
        lambda: mf.compare(mf.Experiment(rounds=1), algorithms=torch.tensor(2)),
        lambda: mf.Experiment(data_path="\udcff"),
        lambda: mf.compare(mf.Experiment(rounds=1), out="a" * 5000),
        lambda: mf.read("a" * 5000),
        lambda: mf.read(2.5),
        lambda: mf.frame(3),
    ],
)
def test_invalid_arguments_raise_usage_error(call):
    with pytest.raises(mf.UsageError):
        call()
