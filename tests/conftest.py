"""Small problems that the tests share."""

import numpy as np
import pytest
import torch

import mimicfl as mf

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """No test reads or writes the user's dataset cache, and each draws the same numbers every time."""
    monkeypatch.setenv("MIMICFL_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("MIMICFL_ENGINE", "plain")  # what "auto" means here; the native engine has tests of its own
    torch.manual_seed(0)  # the tests' own draws; the package does not use this generator


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


def end_on(engine: str, **given) -> torch.Tensor:
    """The last parameters of a run that this engine really trained, and no other in its place; workers want two threads."""
    told = []
    torch.set_num_threads(2 if engine == "workers" else 1)
    try:
        history = mf.simulate(**given, engine=engine, notice=told.append)
    finally:
        torch.set_num_threads(1)
    assert told[0].startswith(f"engine {engine}"), told
    return history.params


def random_schedule(rounds: int, clients: int, seed: int, p: float = 0.4) -> np.ndarray:
    """Everybody at first, then anything, an empty round included."""
    available = np.random.default_rng(seed).random((rounds, clients)) < p
    available[0] = True
    available[rounds // 2] = False
    return available
