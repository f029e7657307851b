"""Nothing is lost: a run stopped anywhere goes on to the same end, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import mimicfl as mf
from mimicfl.metrics.store import RunFolder
from tests.conftest import BUILT_IN, resume

ALGORITHMS = [*BUILT_IN, "mifa:never_seen=exclude", "fedau:cutoff=3"]


class Stop(Exception):
    pass


def experiment(**changes):
    return mf.Experiment(**({"availability": "static:0.2", "rounds": 12, "epochs": 2, "seed": 4} | changes))


def same(a: Path, b: Path):
    """Parameters, algorithm state and rows (but for the seconds they took) are equal to the bit."""
    one, two = RunFolder(a), RunFolder(b)
    for name in ("final", "checkpoint"):
        left, right = one.load(name)[0], two.load(name)[0]
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
    strip = [[{k: v for k, v in row.items() if k != "seconds"} for row in folder.rows()] for folder in (one, two)]
    assert strip[0] == strip[1]


def stopping_at(t):
    def progress(e, row, total):
        if row["round"] == t:
            raise Stop

    return progress


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_stopped_run_ends_bit_equal(tmp_path, algorithm):
    mf.run(experiment(algorithm=algorithm), tmp_path / "whole")
    for every in (0, 1, 5):
        folder = tmp_path / f"every {every}"
        with pytest.raises(Stop):
            mf.run(experiment(algorithm=algorithm, checkpoint_every=every), folder, stopping_at(7))
        assert not RunFolder(folder).finished
        with pytest.raises(Stop):
            resume(folder, stopping_at(9))
        resume(folder)
        same(tmp_path / "whole", folder)


def test_buffers_and_python_objects_resume_too(tmp_path, digits):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 10))
    arguments = {**digits, "model": model, "availability": "static:0.2", "rounds": 8, "local": mf.LocalSGD(steps=3)}

    def stop(row, total):
        if row["round"] == 5:
            raise Stop

    with pytest.warns(UserWarning, match="BatchNorm"):
        mf.simulate(**arguments, out=tmp_path / "whole")
    with pytest.warns(UserWarning), pytest.raises(Stop):
        mf.simulate(**arguments, out=tmp_path / "stopped", progress=stop, checkpoint_every=2)
    with pytest.raises(mf.UsageError, match="started from Python"):
        resume(tmp_path / "stopped")
    with pytest.warns(UserWarning):
        mf.simulate(**arguments, out=tmp_path / "stopped")
    same(tmp_path / "whole", tmp_path / "stopped")
    with pytest.warns(UserWarning), pytest.raises(mf.UsageError, match="different run"):
        mf.simulate(**{**arguments, "split": digits["split"][::-1]}, out=tmp_path / "stopped")


def test_a_finished_run_is_not_trained_again(tmp_path):
    e = experiment()
    first = mf.run(e, tmp_path / "run")
    calls = []
    again = mf.run(e, tmp_path / "run", lambda *a: calls.append(a))
    assert calls == []
    assert torch.equal(first.params, again.params)
    assert again.rows == first.rows


def test_divergence_keeps_the_last_good_checkpoint(tmp_path):
    e = experiment(dataset="synthetic", lr=50.0, rounds=400, availability="always")
    with pytest.raises(mf.Diverged, match=r"last good checkpoint, of round \d+, is kept in"):
        mf.run(e, tmp_path / "run")
    tensors, _ = RunFolder(tmp_path / "run").load("checkpoint")
    assert torch.isfinite(tensors["state.w"]).all()


# A program that has imported everything and forks a run for each line it reads: twenty starts would take minutes. A run waits at the
# round named in the file ALLOWED, so that it never ends before it is killed.
FORKING = """
import os, pathlib, sys, time
import mimicfl as mf

mf.run  # imports PyTorch, so that the forks need not
folder, allowed = map(pathlib.Path, sys.argv[1:])

def pace(e, row, total):
    while row["round"] >= int(allowed.read_text()):
        time.sleep(0.001)

for line in sys.stdin:
    child = os.fork()
    if not child:
        mf.run(mf.Experiment(rounds=130, num_clients=10, epochs=1, availability="static:0.3", checkpoint_every=1), folder, pace)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_sigkill_at_twenty_random_moments(tmp_path):
    """A run killed twenty times and resumed each time ends bit-equal to an uninterrupted one."""
    chance = random.Random(0)
    killed, allowed = tmp_path / "killed", tmp_path / "allowed"
    command = [sys.executable, "-W", "ignore:shards uses", "-c", FORKING, str(killed), str(allowed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:

        def begin():
            program.stdin.write("\n")
            program.stdin.flush()
            return int(program.stdout.readline())

        for _ in range(20):
            # The kill falls into the work: after some rounds of this process, and before the round that it may not exceed.
            target = rows_in(killed) + chance.randrange(5)
            allowed.write_text(str(target + 2))
            child = begin()
            while rows_in(killed) <= target:
                os.kill(child, 0)  # fails if it ended by itself
                time.sleep(0.001)
            time.sleep(chance.random() * 0.01)
            os.kill(child, signal.SIGKILL)
            assert int(program.stdout.readline()) == -signal.SIGKILL
            RunFolder(killed).load("checkpoint")  # readable at every moment
        allowed.write_text("130")
        begin()
        assert int(program.stdout.readline()) == 0
        _, errors = program.communicate()
    assert errors == ""
    mf.run(mf.Experiment(rounds=130, num_clients=10, epochs=1, availability="static:0.3", checkpoint_every=1), tmp_path / "whole")
    same(tmp_path / "whole", killed)
    assert not list(killed.glob(".*.part"))


def rows_in(folder: Path) -> int:
    file = folder / "rows.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.slow
def test_two_processes_cannot_write_one_folder(tmp_path):
    e = experiment()
    inside = []

    def progress(*_):
        with pytest.raises(mf.UsageError, match="another process"):
            mf.run(e, tmp_path / "run")
        inside.append(1)
        raise Stop

    with pytest.raises(Stop):
        mf.run(e, tmp_path / "run", progress)
    assert inside
    mf.run(e, tmp_path / "run")


@pytest.mark.slow
def test_compare_resumes(tmp_path):
    e = experiment(rounds=4, checkpoint_every=1)
    seen = []

    def stop(e, row, total):
        seen.append((e.algorithm, e.seed))
        if (e.algorithm, e.seed, row["round"]) == ("mimic", 0, 2):
            raise Stop

    with pytest.raises(Stop):
        mf.compare(e, ["fedavg", "mimic"], [0, 1], tmp_path, stop)
    assert len(seen) == 11  # round by round, all four at once
    seen.clear()
    results = mf.compare(e, ["fedavg", "mimic"], [0, 1], tmp_path, lambda e, row, total: seen.append((e.algorithm, e.seed)))
    assert sorted(seen) == [("fedavg", 0), ("fedavg", 1), ("mimic", 0), ("mimic", 1), ("mimic", 1)]  # what was left of each
    again = mf.compare(e, ["fedavg", "mimic"], [0, 1], tmp_path, lambda e, row, total: pytest.fail("trained twice"))
    assert torch.equal(results["fedavg"][0].params, again["fedavg"][0].params)
    alone = mf.run(experiment(rounds=4, algorithm="mimic", seed=1))
    assert torch.equal(results["mimic"][1].params, alone.params)


@pytest.mark.slow
def test_compared_algorithms_share_random_numbers(tmp_path):
    results = mf.compare(experiment(rounds=5), ["fedavg", "mimic"], [0, 1])
    for seed in (0, 1):
        assert [r["clients"] for r in results["fedavg"][seed].rows] == [r["clients"] for r in results["mimic"][seed].rows]
    first = [results[a][0].rows[0] for a in ("fedavg", "mimic")]
    assert first[0]["train_loss"] == first[1]["train_loss"]  # same model, same batches
    assert json.dumps(results["fedavg"][0].rows) != json.dumps(results["fedavg"][1].rows)
