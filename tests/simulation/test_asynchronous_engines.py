"""Engines train asynchronous runs as plain does, and resume them with the same bits."""

import itertools
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import mimicfl as mf
from mimicfl.algorithms.updates import Start
from mimicfl.clients.losses import as_loss
from mimicfl.engines.interface import train_clients
from mimicfl.engines.plain import PlainEngine
from mimicfl.engines.stacked.batched.engine import BatchedEngine
from mimicfl.engines.stacked.streams import StreamsEngine
from mimicfl.metrics.store import RunFolder
from soak.draws import draw, sometimes_asynchronous
from soak.engines import against_plain, load
from tests.conftest import ROOT
from tests.engines.engines import MODELS, assert_same, needs_gpu, problem, requests_of
from tests.simulation.test_asynchronous import BASE


def generated(seed, engine):
    """A random network and loss; optimizers, weight decay and augmentation are drawn as well."""
    drawn = replace(draw(seed, engine), sizes=(9, 1, 5, 2), overlap=False)
    drawn = replace(drawn, local={key: value for key, value in drawn.local.items() if not isinstance(value, list)})
    return sometimes_asynchronous(random.Random(seed), drawn, share=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["workers", "native", "batched"])
def test_engines_agree_on_generated_models(tmp_path, engine):
    found = [against_plain(load(generated(seed, engine), tmp_path / str(seed)), engine) for seed in (51, 53, 54)]
    assert {each.verdict for each in found} - {"refused"} == {"ok"}, found


def on_the_gpu(*values):
    return pytest.param("cuda", *values, marks=[pytest.mark.gpu, needs_gpu])


def on_an_engine(device, engine, algorithm, **changes):
    given = BASE | {"engine": engine, "rounds": 6, "model": "mlp:8", "asynchronous": 3, "checkpoint_every": 2}
    return mf.Experiment(**given | {"weight_decay": 0.01, "momentum": 0.5, "algorithm": algorithm, "device": device} | changes)


def timeless(history):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in history.rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "engine", "algorithm"),
    [
        ("cpu", "workers", "fedvarp"),
        ("cpu", "native", "fedbuff"),
        ("cpu", "batched", "mimic"),
        ("cpu", "streams", "mimic"),
        *(on_the_gpu(engine, algorithm) for engine in ("plain", "batched", "streams") for algorithm in ("fedbuff", "mimic")),
    ],
)
def test_engines_agree_and_resume_with_the_same_bits(tmp_path, device, engine, algorithm, monkeypatch):
    torch.set_num_threads(2)  # for workers; restored for every test
    if (device, engine) == ("cpu", "streams"):  # users are refused, but its lanes work without CUDA graphs, too
        monkeypatch.setattr("mimicfl.experiments.build.check_engine", lambda name, device: None)
    e = on_an_engine(device, engine, algorithm)
    plain, whole = (mf.run(replace(e, engine=name)) for name in ("plain", engine))
    assert max(max(row["staleness"]) for row in whole.rows) > 1
    assert all(a["virtual_seconds"] < b["virtual_seconds"] for a, b in itertools.pairwise(whole.rows))
    torch.testing.assert_close(whole.params, plain.params, rtol=1e-4, atol=1e-6 if device == "cpu" else 1e-5)

    def stop(settings, row, rounds):
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mf.run(e, tmp_path / "broken", stop)
    assert RunFolder(tmp_path / "broken").load("checkpoint")[1]["engine"].startswith(engine)
    resumed = mf.run(e, tmp_path / "broken")
    assert torch.equal(resumed.params, whole.params)
    assert timeless(resumed) == timeless(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "engine", "algorithm"),
    [
        ("cpu", "batched", "mimic"),
        *(on_the_gpu(engine, algorithm) for engine in ("batched", "streams") for algorithm in ("fedbuff", "mimic")),
    ],
)
def test_engines_equal_plain_in_double_precision(tmp_path, device, engine, algorithm):
    e = on_an_engine(device, engine, algorithm, dtype="float64")
    plain, found = mf.run(replace(e, engine="plain")), mf.run(e, tmp_path)
    assert RunFolder(tmp_path).load("checkpoint")[1]["engine"].startswith(engine)
    torch.testing.assert_close(found.params, plain.params, rtol=1e-9, atol=1e-11)


KILLED = """
import os, signal, sys
import mimicfl as mf
from tests.simulation.test_asynchronous_engines import on_an_engine

def kill(settings, row, rounds):
    if row["round"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)

mf.run(on_an_engine(*sys.argv[2:]), sys.argv[1], kill)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("device", "engine", "algorithm"), [("cpu", "batched", "mimic"), on_the_gpu("streams", "mimic")])
def test_a_killed_run_ends_with_the_bits_of_another_process(tmp_path, device, engine, algorithm):
    words = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), device, engine, algorithm]
    assert subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}).returncode == -signal.SIGKILL
    folder = RunFolder(tmp_path / "killed")
    assert not folder.finished
    assert folder.load("checkpoint")[1]["engine"].startswith(engine)
    e = on_an_engine(device, engine, algorithm)
    assert torch.equal(mf.run(e, tmp_path / "killed").params, mf.run(e).params)


@pytest.mark.parametrize("kind", [BatchedEngine, StreamsEngine])
def test_clients_of_one_run_train_together_whatever_their_start(monkeypatch, kind):
    """The lanes of a run hold clients with different models, rates and buffers; other runs are kept apart on a CPU."""
    model, clients = problem(MODELS["mlp"]())
    first, other = requests_of(model, clients)
    w, rates = first.w, [0.05, 0.03, 0.04, 0.05]
    starts = [Start(w * (1 + 0.1 * k), first.buffers, eta_L) for k, eta_L in enumerate(rates)]
    stale = replace(first, starts=starts, instructions=replace(first.instructions, start=torch.stack([s.w for s in starts])))
    engine, plain = (make(model, clients, as_loss("cross-entropy")) for make in (kind, PlainEngine))
    calls = []
    monkeypatch.setattr(engine, "_build_and_run", lambda jobs, run=engine._build_and_run: calls.append(len(jobs)) or run(jobs))
    assert_same(train_clients(engine, [stale, other]), train_clients(plain, [stale, other]))
    assert calls == [4, 2]
