"""Types: the examples pass the strict type checker as a user's code would, and public functions have precise types."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

# What a user's editor must know; a wrong type here is an error.
USE = """
from typing import Any, assert_type

import numpy as np
from torch import nn

import mimicfl as mf


def use(experiment: mf.Experiment, model: nn.Module, data: mf.Data) -> None:
    history = mf.run(experiment, out="runs/a", progress=mf.ProgressBar())
    assert_type(history, mf.History)
    assert_type(history.rows, list[dict[str, Any]])
    assert_type(history.model(), nn.Module)
    assert_type(history.active, np.ndarray)
    assert_type(mf.simulate(model, data, mf.partition.iid(data.y_train, 5), mf.MimiC(), rounds=3), mf.History)
    assert_type(mf.compare(experiment, [mf.FedAvg, "mimic"], seeds=2), dict[str, list[mf.History]])
    assert_type(mf.read("runs/a"), mf.History)
    assert_type(mf.datasets.load("digits"), mf.Data)
    assert_type(mf.models.build("mlp", data), nn.Module)
    assert_type(mf.availability.schedule("static:0.1", 10, 5), np.ndarray)
    assert_type(mf.__version__, str)
"""
WRONG = """
import mimicfl as mf

mf.run("digits")
mf.Experiment(rouns=3)
mf.no_such_name
"""


def checked(*files):
    command = [sys.executable, "-m", "mypy", "--strict", "--disable-error-code=type-arg", *map(str, files)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_examples_and_public_names_have_types(tmp_path):
    (tmp_path / "use.py").write_text(USE)
    done = checked(*sorted((ROOT / "examples").glob("*.py")), tmp_path / "use.py")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_mistakes_are_found(tmp_path):
    """Otherwise the types would be `Any`, and the test above could not fail."""
    (tmp_path / "wrong.py").write_text(WRONG)
    out = checked(tmp_path / "wrong.py").stdout
    assert [word in out for word in ("[arg-type]", "[call-arg]", "[attr-defined]")] == [True] * 3, out
