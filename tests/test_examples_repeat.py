"""The README and the examples give the same results every time, whatever the state of torch's global generator."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from mimicfl.data.datasets import DATASETS
from mimicfl.local.models import MODELS

ROOT = Path(__file__).parent.parent


def result(source, state):
    """What a script prints and its final model, started with torch's generator in this state."""
    torch.manual_seed(state)
    out, names = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(out):
        exec(compile(source, "shown", "exec"), names)
    return out.getvalue(), names["history"].params


def shortened(source, rounds=5):
    """With fewer rounds."""
    short, places = re.subn(r"\brounds=\d+", f"rounds={rounds}", source)
    assert places
    return short


def test_the_python_example_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [source] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (first, w), (second, v) = (result(shortened(source), state) for state in (1, 2))
    assert re.fullmatch(r"0\.\d+ \d+\n", first)
    assert first == second
    assert torch.equal(w, v)


@pytest.mark.parametrize("name", ["each_round", "own_model_and_data"])
def test_examples_that_build_their_own_model(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for registry in (DATASETS, MODELS):  # what an example registers is its own
        monkeypatch.setattr(registry, "factories", dict(registry.factories))
    source = shortened((ROOT / "examples" / f"{name}.py").read_text())
    (first, w), (second, v) = (result(source, state) for state in (1, 2))
    assert "%" in first
    assert first == second
    assert torch.equal(w, v)
