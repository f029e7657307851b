"""Leftover files, full disks, and the limit on open files."""

import os
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch

import mimicfl as mf
from mimicfl import files, rows
from mimicfl.data.partition import dirichlet
from mimicfl.sweep import carry_out


def test_temporary_files_of_a_killed_checkpoint_are_swept(tmp_path):
    """safetensors first writes to a temporary file, which a kill leaves behind."""
    e = mf.Experiment(rounds=2, num_clients=6, epochs=1)
    mf.run(e, tmp_path)
    (tmp_path / "final.safetensors").unlink()
    (tmp_path / ".tmpAb3dEf").write_text("half a checkpoint")
    mf.run(e, tmp_path)
    assert not list(tmp_path.glob(".tmp*"))


def test_unfinished_files_of_dead_processes_are_swept_and_others_kept(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, alive = (tmp_path / f".curves.png.{process}-0123abcd.part" for process in (ended.pid, os.getpid()))
    for file in (dead, alive, tmp_path / ".other.part"):
        file.write_text("half")
    files.sweep_dead(tmp_path)
    assert not dead.exists()
    assert alive.exists()
    assert (tmp_path / ".other.part").exists()


def test_memory_mapped_state_takes_its_room_when_it_is_made(tmp_path, monkeypatch):
    """On a full disk, writing to a hole of a sparse file would kill the process."""

    def full(descriptor, begin, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rows.os, "posix_fallocate", full)
    with pytest.raises(mf.UsageError, match="No space left"):
        mf.run(mf.Experiment(rounds=2, num_clients=6, epochs=1, state_budget="0"), tmp_path)
    monkeypatch.undo()
    assert len(mf.run(mf.Experiment(rounds=2, num_clients=6, epochs=1, state_budget="0"), tmp_path).rows) == 2


def test_more_runs_than_files_may_be_open(tmp_path, monkeypatch):
    """They are trained in as many groups as it takes."""
    monkeypatch.setattr(mf.sweep.fuse, "open_files", lambda: mf.sweep.fuse.SPARE_FILES + 2)
    base = mf.Experiment(rounds=1, num_clients=4, steps=1, availability="always")
    plan = {str(seed): mf.Experiment(**{**base.to_dict(), "seed": seed}) for seed in range(5)}
    said = []
    found = carry_out(plan, tmp_path, notice=said.append)
    assert len(found) == 5
    assert len(said) == 3  # one engine for each group of two


def test_a_run_keeps_one_file_open(tmp_path):
    """Its lock: rows are opened when they are written."""
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


def test_the_limit_of_open_files_is_raised():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        assert files.open_files() == min(before[1] if before[1] != resource.RLIM_INFINITY else files.MANY_FILES, files.MANY_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_dirichlet_counts_before_it_builds():
    """The same split as the definition gives: class by class, proportions first, then the shuffle."""
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
def test_wrong_arguments_are_refused_in_words(call):
    with pytest.raises(mf.UsageError):
        call()
