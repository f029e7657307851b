"""Small problems that the tests share, and fixtures that isolate the tests from each other."""

import json
import os
import sys
import time
import zlib
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # also for programs that tests start: more threads than cores stall each other

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import mimicfl as mf
from mimicfl.experiments.results import resumable
from mimicfl.metrics.store import RunFolder
from mimicfl.problem import Problem
from mimicfl.registry import NAMED_BY
from mimicfl.simulation.setup import set_up
from mimicfl.toml import dumps

BUILT_IN = dict(mf.algorithms.ALGORITHMS.factories)  # name -> class, before any test registers its own
ROOT = Path(__file__).parent.parent
torch.set_num_threads(1)
# The same examples in every run, and no deadline: a busy machine is not a failure.
settings.register_profile("suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture
def _as_before():
    """Undone last: no plugin stays imported, and PyTorch's settings are restored."""
    plugins = _plugins()
    yield
    for name in _plugins() - plugins:
        del sys.modules[name]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def _isolated(_as_before, tmp_path_factory, monkeypatch):
    """The user's cache is not used; code is compiled once for all tests. Each draws the same numbers and unregisters its names."""
    monkeypatch.setenv("MIMICFL_CACHE", str(shared(tmp_path_factory) / "cache"))
    monkeypatch.setenv("MIMICFL_ENGINE", "plain")  # what "auto" means here; the native engine has tests of its own
    torch.manual_seed(0)  # the tests' own draws; the package does not use this generator
    for registry in dict.fromkeys(NAMED_BY.values()):
        monkeypatch.setattr(registry, "factories", dict(registry.factories))


def shared(tmp_path_factory):
    """A folder of all tests of this session, in both of xdist's processes; in it, code is compiled once."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def _plugins():
    return {name for name in sys.modules if name.startswith("mimicfl_plugin_")}


def wait_until(condition, what, every=0.05):
    """Poll until the condition holds, and return its value. The test's own timeout ends a wait in vain."""
    began = said = time.monotonic()
    while not (found := condition()):
        time.sleep(every)
        if time.monotonic() - said > 30:  # seen if the timeout strikes
            said = time.monotonic()
            print(f"for {said - began:.0f} s waiting for {what}", file=sys.stderr)
    return found


def resume(path, progress=None, notice=None):
    """Finish an interrupted run, as `mimicfl resume` does."""
    return mf.run(resumable(RunFolder(path)), path, progress, notice)


def forge(run, settings=None, rows=None):
    """Edit a run folder and sign it again: checksums detect damage, not forgery, so readers must handle any content."""
    folder = RunFolder(run)
    held = {name: saved for name in ("checkpoint", "final") if (saved := folder.load(name))}
    (run / "config.toml").write_text(dumps({**folder.config, **(settings or {})}))
    kept = folder.rows() if rows is None else rows
    folder = RunFolder(run)
    crc, lines = 0, []
    for row in kept:
        text = json.dumps(row)
        crc = zlib.crc32(text.encode(), crc)
        lines.append(f'{text[:-1]}, "crc": "{crc:08x}"}}\n')
    (run / "rows.jsonl").write_text("".join(lines))
    folder._rows.crc = crc
    for name, (tensors, facts) in held.items():
        folder.save(
            name, tensors, **{key: value for key, value in facts.items() if key not in ("format", "crc32", "rows", "config", "lengths")}
        )
    folder.close()


@pytest.fixture
def quadratic():
    """Six clients who disagree, twelve samples each, and the model that can reach the known optimum."""
    data = mf.datasets.load("synthetic", num_clients=6, dim=5, samples=12, heterogeneity=2.0, seed=1)
    split = mf.partition.by_ids(data.ids)
    model = mf.models.Logistic(5, 1, bias=False).double()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return {"model": model, "data": data, "split": split}


@pytest.fixture
def digits():
    data = mf.datasets.load("digits")
    return {"data": data, "split": mf.partition.shards(data.y_train, 30, 2, seed=0), "model": mf.models.build("mlp", data, seed=0)}


def run_on(engine: str, **given):
    """A run that was really trained by this engine, not by a fallback."""
    if engine == "workers" and torch.cuda.is_available():
        pytest.skip("worker processes need a machine without a visible GPU")
    told = []
    history = mf.simulate(**given, engine=engine, notice=told.append)
    assert told[0].startswith(f"engine {engine.partition(':')[0]}"), told
    return history


def end_on(engine: str, **given) -> torch.Tensor:
    """The final parameters of a run on this engine; workers need two threads."""
    torch.set_num_threads(2 if engine == "workers" else 1)
    try:
        return run_on(engine, **given).params
    finally:
        torch.set_num_threads(1)


def random_schedule(rounds: int, clients: int, seed: int, p: float = 0.4) -> np.ndarray:
    """Everybody at first, then anything, an empty round included."""
    available = np.random.default_rng(seed).random((rounds, clients)) < p
    available[0] = True
    available[rounds // 2] = False
    return available


def make_run(model, data, split, *, algorithm="mimic", availability="always", rounds=1, seed=0, local=None, loss=None, **change):
    """A run before its first round, as `simulate` makes it."""
    how = {"weighting": "uniform", "device": "cpu", "precision": "fp32"}
    where = [change.pop(name, value) for name, value in how.items()]
    problem = Problem.of(model, data, split, local or mf.LocalSGD(epochs=1), loss, *where)
    chosen = {"algorithm": algorithm, "availability": availability, "rounds": rounds, "seed": seed}
    return set_up(problem, vars(mf.Experiment()) | chosen | change)
