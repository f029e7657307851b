"""Runs that train together read from the device a few times per round, not several times per run: every read waits for a GPU."""

import collections
import sys
from pathlib import Path

import pytest
import torch

import mimicfl as mf
from mimicfl.algorithms import ALGORITHMS
from mimicfl.experiments.execute import run_plan

READS = ("cpu", "tolist", "item", "__bool__", "__int__", "__float__")
IN_HOST_MEMORY = {"round_loop.mean_losses", "amplified_fedavg.amplify"}  # what they read is there already
PER_RUN = {"store", "files", "checkpoint", "fingerprint", "values", "run.history", "history", "problem"}  # at the beginning and at the end
ROUNDS = 4


@pytest.fixture
def reads(monkeypatch):
    """The reads of tensors so far, by the function that made them."""
    found = collections.Counter()

    def counting(name):
        original = getattr(torch.Tensor, name)

        def read(tensor, *args, **kwargs):
            code = sys._getframe(1).f_code
            if "mimicfl" in Path(code.co_filename).parts:
                found[f"{Path(code.co_filename).stem}.{code.co_qualname.partition('.<')[0]}"] += 1
            return original(tensor, *args, **kwargs)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    return found


def in_rounds(reads, plan):
    """The reads while the runs of a plan train, without those of host memory and those that every run makes once."""
    reads.clear()
    run_plan(plan)
    kept = {where: n for where, n in reads.items() if where not in IN_HOST_MEMORY}
    return {where: n for where, n in kept.items() if not {where, where.partition(".")[0]} & PER_RUN}


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS.factories if name not in ("focus", "fedbuff")])
def test_reads_do_not_grow_with_the_runs(algorithm, reads):
    """With one seed and with three; FOCUS trains on another engine, which has reads of its own."""
    settings = {"dataset": "digits", "model": "mlp:4", "num_clients": 6, "rounds": ROUNDS, "epochs": 1, "engine": "native"}
    settings |= {"availability": "static:0.5", "algorithm": algorithm}
    one, three = ({f"s{seed}": mf.Experiment(**settings, seed=seed) for seed in range(seeds)} for seeds in (1, 3))
    in_rounds(reads, one)  # compiles
    few, many = in_rounds(reads, one), in_rounds(reads, three)
    grown = {where: (few.get(where, 0), n) for where, n in many.items() if n - few.get(where, 0) >= 2 * ROUNDS}
    assert not grown
    assert sum(many.values()) > 0
